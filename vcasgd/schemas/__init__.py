"""Pydantic models of the REST API's JSON, shared by the API and its Python client.

A *view* shows one resource, a *row* is an entry of a listing, and a *request* is a body that a
client sends. Times are Unix seconds, money is in USD.
"""
