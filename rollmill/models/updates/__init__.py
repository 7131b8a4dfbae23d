"""Weight updates on the device: makes deltas, applies them, and audits the parameters, without moving the model."""
