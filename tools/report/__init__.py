"""What people look at after training: the runs of a folder, in one page that needs nothing else, and in pictures."""
