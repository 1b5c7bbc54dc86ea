"""The part of TransferQueue's `utils` that its users import: `logging_utils`."""
