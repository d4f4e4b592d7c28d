"""Whether steps under the rule sets that ship compute what they compute on one device:
`python -m benchmarks.rule_sets`.
"""
