"""What a simple rule can tell of the labels of generated images: must be nothing."""

import math

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def blocks(images: np.ndarray, side: int) -> np.ndarray:
    """Mean levels of side x side blocks: [n, S, S, C] -> float64 [n, features]."""
    n, size = images.shape[:2]
    return images.reshape(n, side, size // side, side, size // side).mean((2, 4), dtype=np.float64).reshape(n, -1)


def excess(features: np.ndarray, labels: np.ndarray, model=None) -> float:
    """Accuracy, on the second half, of a rule learned on the first: in standard deviations above chance."""
    half = len(features) // 2
    train, test = slice(0, half), slice(half, len(features))
    rule = make_pipeline(StandardScaler(), model or LogisticRegression(C=1e-3, max_iter=1000))
    accuracy = rule.fit(features[train], labels[train]).score(features[test], labels[test])
    return (accuracy - 0.5) / (0.5 / math.sqrt(len(features) - half))
