"""The policy desk: operators edit policy, see what an edit would have done, and send it off, now or later."""
