"""The primitives, of all versions of JAX and of ours, that make each element of the elements in the same place."""

BY_ELEMENT = frozenset(
    """
    abs acos acosh add add_any add_jaxvals and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz
    complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1
    floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p
    log2 logistic lt lt_to max meant_for mesh_cast min mul name ne neg nextafter not one_minus_square
    optimization_barrier or
    pbroadcast pcast polygamma population_count pow pvary random_gamma_grad real reduce_precision reduced_vary_cast
    regularized_incomplete_beta rem reshard round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh vary_unreduced_cast xor zeta
    """.split()
)
