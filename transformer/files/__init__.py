"""What is read, and by which worker: shards of the input, text files, TFRecords."""
