"""What is matched: a file for each thing that a model may write, in the ways in which it is written."""
