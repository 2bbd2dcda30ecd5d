"""Four click models over an embedding collection, short enough to read and to copy."""

from __future__ import annotations

from recsys_embed.models.click_models import DCN, DLRM, MODELS, DeepFM, WideDeep, make_model

__all__ = ["DCN", "DLRM", "MODELS", "DeepFM", "WideDeep", "make_model"]
