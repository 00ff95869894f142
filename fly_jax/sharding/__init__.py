"""Meshes of devices, and the mapping of an array's logical axes to the axes of a mesh."""
