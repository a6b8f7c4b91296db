"""Input files and their division among workers: text files, TFRecords, shards."""
