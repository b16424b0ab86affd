"""The corpus room: raw sources become documents, streamed, decoded strictly, with nothing lost."""
