"""Hugging Face's Trainer and accelerate, with a model that is split over the ranks."""
