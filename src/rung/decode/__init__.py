"""Decoding: from a prompt to text, token by token, with cached keys and values.

Letters of array names are those of ``rung.model``; N stands for the tokens of one chunk.
"""
