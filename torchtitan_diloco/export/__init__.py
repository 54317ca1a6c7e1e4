"""What leaves the project: dense weights in files that other programs read, and a folder that transformers loads."""
