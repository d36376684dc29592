"""What makes a run slow or wrong: each rule looks for one thing and says what to change."""
