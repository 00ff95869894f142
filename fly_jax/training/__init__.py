"""Training of small drafters, and the word problems that the commands ask when nothing is asked."""
