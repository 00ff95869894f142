"""Meshes of devices, and which logical axis of an array lies on which axis of the mesh."""
