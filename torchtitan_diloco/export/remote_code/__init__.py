"""Source of the model that an exported folder contains. It imports only torch and transformers."""
