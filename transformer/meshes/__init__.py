"""The mesh of a model: its devices and layout, and the arithmetic of batches on it."""
