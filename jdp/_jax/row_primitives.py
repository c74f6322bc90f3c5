"""JAX's primitives, sorted by what they do to sums over the rows; by name, with `_` for `-`."""

from __future__ import annotations


def _names_in(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Linear in each operand, and in all of them together.
LINEAR = _names_in(
    "add add_any sub neg concatenate stack tile pad convert_element_type broadcast_in_dim reshape transpose squeeze "
    "expand_dims rev copy copy_p reduce_precision real imag conj complex slice split unstack cumsum reduce_window_sum "
    "reduce_sum name stop_gradient sharding_constraint mesh_cast reshard"
)
# Linear, and adds up entries of one array.
SUMS = _names_in("reduce_sum cumsum reduce_window_sum")
# May add up entries of several rows.
MAY_SUM = _names_in("reduce_sum dot_general conv_general_dilated scatter_add scatter_sub")
# Adds up all entries along the axes that it names.
ADDS_UP = _names_in("reduce_sum dot_general")
# Factors of a matrix; each of their entries is made of all entries of the matrix.
DECOMPOSITIONS = _names_in("qr geqrf householder_product svd")
# Each entry is made of several neighbouring ones.
WINDOWS = DECOMPOSITIONS | _names_in(
    "conv_general_dilated reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "reduce_window_and reduce_window_or fft"
)
# Zero at each place where all operands are zero.
KEEP_ZERO = _names_in(
    "add add_any sub neg abs square integer_pow sign sqrt cbrt sin tan asin atan sinh tanh asinh atanh expm1 log1p erf "
    "floor ceil round real imag conj convert_element_type broadcast_in_dim reshape transpose squeeze expand_dims "
    "reduce_sum copy name stop_gradient"
)
# The sum of two arrays, or their difference.
ADDS = _names_in("add add_any sub")
# Each result is made of the operand with the same index.
EACH = _names_in("optimization_barrier device_put pvary pcast")
# Linear in each of two operands, but not in both together; a quotient is linear in the first operand alone.
PRODUCTS = _names_in("mul div dot_general conv_general_dilated")
# The layers of a model.
LAYERS = _names_in("dot_general conv_general_dilated")
# Linear in the operands at these places, and not in the others, which are indices.
INDEXED = {
    "gather": [0],
    "dynamic_slice": [0],
    "dynamic_update_slice": [0, 1],
    "scatter": [0, 2],
    "scatter_add": [0, 2],
    "scatter_sub": [0, 2],
    "select_and_scatter_add": [0],
    "select_and_gather_add": [0],
}
# Each entry is made of all entries before it.
CUMULATIVE = _names_in("cumsum cumprod cummax cummin cumlogsumexp")
# Picks some of the entries of an array.
PICKS = _names_in("slice dynamic_slice gather split unstack")
# Picks entries, or moves them to other positions.
MOVES = PICKS | _names_in("rev concatenate pad reshape")
# Puts one array in the place of another, or chooses between them.
PLACES = _names_in("pad dynamic_update_slice scatter cond")
# Makes booleans of booleans.
OF_BOOLS = _names_in("not and or xor reduce_and reduce_or")
# Compares two operands.
COMPARES = _names_in("eq ne lt le gt ge eq_to lt_to le_to")
# The results have fixed limits, whatever the operands are.
BOUNDED = OF_BOOLS | COMPARES | _names_in("is_finite sign argmax argmin")
# Not linear, but if all operands are doubled, so is the result.
KEEP_DEGREE = _names_in(
    "abs max min clamp reduce_max reduce_min reduce_window_max reduce_window_min cummax cummin top_k"
)
# Writes entries into an array, or combines them with its own, at indices.
SCATTERS = _names_in("scatter scatter_add scatter_sub scatter_mul scatter_max scatter_min")
# Random numbers.
DRAWS = _names_in("random_bits random_split random_gamma rng_bit_generator rng_uniform threefry2x32")
# Powers that may be roots.
ROOTS = _names_in("sqrt rsqrt pow")
# The square, and other whole powers.
POWERS = _names_in("integer_pow square")
# Known not to be linear. A primitive that is in no table may do anything.
NONLINEAR = (
    BOUNDED
    | KEEP_DEGREE
    | POWERS
    | _names_in(
        "exp exp2 log log1p expm1 sqrt rsqrt cbrt pow sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh "
        "atanh logistic erf erfc erf_inv lgamma digamma floor ceil round rem nextafter reduce_prod cumprod "
        "cumlogsumexp cholesky eigh svd lu qr triangular_solve custom_linear_solve tridiagonal_solve approx_top_k "
        "reduce igamma igammac bessel_i0e bessel_i1e polygamma zeta regularized_incomplete_beta scatter_mul "
        "scatter_max scatter_min eig schur hessenberg tridiagonal igamma_grad_a random_gamma_grad reduce_xor clz mulhi "
        "population_count bitcast_convert_type"
    )
)
# Each entry of a result is made of the entries at its place.
ELEMENTWISE = _names_in(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp complex conj "
    "convert_element_type copy copy_p cos cosh device_put digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or "
    "population_count pow real reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor random_bits random_fold_in "
    "random_seed random_split random_unwrap random_wrap"
)
# Makes entries for each row of the same row's entries, if there is an axis of the rows left.
KEEP_GIVEN = (
    ELEMENTWISE
    | LAYERS
    | _names_in(
        "broadcast_in_dim reshape squeeze expand_dims transpose concatenate stack tile slice gather argmax "
        "argmin reduce_sum reduce_max reduce_min"
    )
)
