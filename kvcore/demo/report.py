"""A demo report as one JSON document."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import kvcore
from kvcore.demo.run import TOLERANCE, Report, Search
from kvcore.demo.stores import TOKENS_PER_BLOCK


def as_json(report: Report) -> str:
    """The report as JSON: text, scores, pages, bytes moved, speed and the check."""
    shape, training = report.weights.shape, report.weights.training
    document = {
        "kvcore": kvcore.__version__,
        "device": report.device,
        "model": {**asdict(shape), **{f"training_{name}": fact for name, fact in training.items()}},
        "settings": asdict(report.settings),
        "prompt_tokens": len(report.settings.prompt_bytes),
        "tokens_per_block": TOKENS_PER_BLOCK,
        "page_bytes": report.beam.page_bytes,
        "check": {
            "passed": report.passed,
            "steps": report.greedy.check.steps + report.beam.check.steps,
            "max_abs_diff": max(report.greedy.check.max_abs_diff, report.beam.check.max_abs_diff),
            "bit_equal": report.greedy.check.bit_equal and report.beam.check.bit_equal,
            "tolerance": TOLERANCE,
        },
        "greedy": _search(report.greedy),
        "beam": _search(report.beam),
        "seconds": round(report.seconds, 3),
    }
    return json.dumps(document, indent=2, ensure_ascii=True)


def _search(search: Search) -> dict[str, Any]:
    return {
        "hypotheses": [
            {
                "text": beam.text,
                "score": beam.score,
                "log_prob": beam.log_prob,
                "pages": list(beam.pages),
                "shared_pages": beam.shared_pages,
                "private_pages": beam.private_pages,
            }
            for beam in search.hypotheses
        ],
        "pages": {
            "in_use": search.pages_in_use,
            "peak": search.peak_pages,
            "without_sharing": search.pages_unshared,
        },
        "moved": {
            "kvcore_bytes": search.paged_moved.bytes,
            "kvcore_pages": search.paged_moved.pages,
            "kvcore_table_cells": search.paged_moved.cells,
            "dense_bytes": search.dense_moved.bytes,
            "dense_changed_rows_bytes": search.dense_moved.changed_bytes,
        },
        "tokens_generated": search.generated,
        "seconds": round(search.paged_seconds, 4),
        "tokens_per_second": round(search.generated / search.paged_seconds, 1),
        "dense_tokens_per_second": round(search.generated / search.dense_seconds, 1),
    }
