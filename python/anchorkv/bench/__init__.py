# SPDX-License-Identifier: Apache-2.0
"""Evaluation of cache compression: python -m anchorkv.bench ruler|niah|longbench|ppl|report."""
