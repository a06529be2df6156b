"""What is there: GPU, software, model and launch command lines, each fact with where it was read. No torch import."""
