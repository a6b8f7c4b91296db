"""What a training shows and writes of itself: see docs/reporting.md."""
