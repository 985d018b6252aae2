"""What a Submit becomes: requests, text that may stop, messages and one Usage. Refuses to know threads and devices."""
