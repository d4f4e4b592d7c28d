"""Steps and single operations that judge an estimate of traffic: written before it, and
without reading its code.
"""
