"""What a layout matches and costs, found out without running: behind `mtf.describe`."""
