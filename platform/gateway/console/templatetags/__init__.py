"""What templates of the pages for people need beyond Django's own."""
