//! Fast random number generators for several distributions, with identical results on every machine.
//!
//! If any crate in the build enables the `std` feature of `num-traits`, `rand_distr` uses the C library's exp and ln. C
//! libraries differ in the last bit, so this module uses `libm`, which is written in Rust.

use std::sync::LazyLock;

use rand::Rng;

const ZIGGURAT_LAYER_COUNT: usize = 256;

/// Ziggurat sampler for a decreasing probability density on x >= 0. It is cut into layers of equal area (Marsaglia and
/// Tsang, "The ziggurat method for generating random variables", J. Stat. Softw. 5, 2000). Nearly always, one draw, one
/// multiplication and one comparison suffice.
#[derive(Debug)]
struct ZigguratSampler {
    /// Right ends of the layers, from the lowest layer to the highest. The first is the width of a rectangle with the
    /// area of the lowest layer and the tail. The last is 0.
    layer_ends: [f64; ZIGGURAT_LAYER_COUNT + 1],
    /// Density at the right end of each layer.
    layer_heights: [f64; ZIGGURAT_LAYER_COUNT + 1],
}

impl ZigguratSampler {
    /// Computes the layers. The paper gives the start of the tail and the area of each layer.
    fn new(tail_start: f64, layer_area: f64, density: fn(f64) -> f64, inverse_density: fn(f64) -> f64) -> Self {
        let mut layer_ends = [0.0; ZIGGURAT_LAYER_COUNT + 1];
        (layer_ends[0], layer_ends[1]) = (layer_area / density(tail_start), tail_start);
        for layer in 2..ZIGGURAT_LAYER_COUNT {
            layer_ends[layer] = inverse_density(density(layer_ends[layer - 1]) + layer_area / layer_ends[layer - 1]);
        }
        Self { layer_ends, layer_heights: layer_ends.map(density) }
    }

    /// Draws a random height within the layer, and returns whether it is below `density`, the density at the point's x.
    #[cold]
    fn is_random_height_below_density(&self, rng: &mut impl Rng, layer: usize, density: f64) -> bool {
        let (lower_height, upper_height) = (self.layer_heights[layer], self.layer_heights[layer + 1]);
        lower_height + (upper_height - lower_height) * draw_uniform_below_one(rng) < density
    }
}

const EXPONENTIAL_TAIL_START: f64 = 7.697_117_470_131_05;
static EXPONENTIAL_ZIGGURAT: LazyLock<ZigguratSampler> = LazyLock::new(|| {
    ZigguratSampler::new(
        EXPONENTIAL_TAIL_START,
        3.949_659_822_581_557e-3,
        |x| libm::exp(-x),
        |height| -libm::log(height),
    )
});

const NORMAL_TAIL_START: f64 = 3.654_152_885_361_009;
static NORMAL_ZIGGURAT: LazyLock<ZigguratSampler> = LazyLock::new(|| {
    let compute_inverse_density = |height| (-2.0 * libm::log(height)).sqrt();
    ZigguratSampler::new(
        NORMAL_TAIL_START,
        4.928_673_233_974_655e-3,
        |x| libm::exp(-x * x / 2.0),
        compute_inverse_density,
    )
});

/// Returns a uniformly distributed number in [0, 1) with 53 random bits.
#[inline]
pub fn draw_uniform_below_one(rng: &mut impl Rng) -> f64 {
    (rng.next_u64() >> 11) as f64 * const { 1.0 / (1u64 << 53) as f64 }
}

/// Returns a uniformly distributed number in (0, 1], whose logarithm is finite.
fn draw_uniform_above_zero(rng: &mut impl Rng) -> f64 {
    1.0 - draw_uniform_below_one(rng)
}

/// Returns an exponentially distributed number with mean 1.
#[inline]
pub fn draw_exponential(rng: &mut impl Rng) -> f64 {
    let ziggurat = &*EXPONENTIAL_ZIGGURAT;
    loop {
        let random_bits = rng.next_u64();
        // The lowest bits select the layer, and the highest 53 bits the position in the layer.
        let layer = random_bits as usize % ZIGGURAT_LAYER_COUNT;
        let x = (random_bits >> 11) as f64 * const { 1.0 / (1u64 << 53) as f64 } * ziggurat.layer_ends[layer];
        if x < ziggurat.layer_ends[layer + 1] {
            return x;
        }
        if layer == 0 {
            // The tail of an exponential distribution is itself exponentially distributed.
            return EXPONENTIAL_TAIL_START - libm::log(draw_uniform_above_zero(rng));
        }
        if ziggurat.is_random_height_below_density(rng, layer, libm::exp(-x)) {
            return x;
        }
    }
}

/// Returns a normally distributed number with mean 0 and variance 1.
#[inline]
pub fn draw_standard_normal(rng: &mut impl Rng) -> f64 {
    let ziggurat = &*NORMAL_ZIGGURAT;
    loop {
        let random_bits = rng.next_u64();
        let layer = random_bits as usize % ZIGGURAT_LAYER_COUNT;
        let sign = if random_bits & ZIGGURAT_LAYER_COUNT as u64 == 0 { 1.0 } else { -1.0 };
        let x = (random_bits >> 11) as f64 * const { 1.0 / (1u64 << 53) as f64 } * ziggurat.layer_ends[layer];
        if x < ziggurat.layer_ends[layer + 1] {
            return sign * x;
        }
        if layer == 0 {
            return sign * draw_normal_tail(rng);
        }
        if ziggurat.is_random_height_below_density(rng, layer, libm::exp(-x * x / 2.0)) {
            return sign * x;
        }
    }
}

/// Returns a number from the tail of the normal distribution (Marsaglia, "Generating a variable from the tail of the
/// normal distribution", Technometrics 6, 1964).
#[cold]
fn draw_normal_tail(rng: &mut impl Rng) -> f64 {
    loop {
        let x = -libm::log(draw_uniform_above_zero(rng)) / NORMAL_TAIL_START;
        if -2.0 * libm::log(draw_uniform_above_zero(rng)) >= x * x {
            return NORMAL_TAIL_START + x;
        }
    }
}

/// Returns a log-normally distributed number, whose logarithm has this mean and standard deviation.
pub fn draw_log_normal(rng: &mut impl Rng, mean: f64, standard_deviation: f64) -> f64 {
    libm::exp(mean + standard_deviation * draw_standard_normal(rng))
}

#[cfg(test)]
mod tests {
    use coreward_model::rss::seeded_rng;

    use super::*;

    const DRAW_COUNT: usize = 1_000_000;

    /// Returns the Kolmogorov-Smirnov distance between random draws and a cumulative distribution function.
    fn kolmogorov_smirnov_distance(draw: impl FnMut() -> f64, distribution: impl Fn(f64) -> f64) -> f64 {
        let mut draws: Vec<f64> = std::iter::repeat_with(draw).take(DRAW_COUNT).collect();
        draws.sort_by(f64::total_cmp);
        let distribution_difference =
            |(i, x): (usize, &f64)| (distribution(*x) - (i as f64 + 0.5) / DRAW_COUNT as f64).abs();
        draws.iter().enumerate().map(distribution_difference).fold(0.0, f64::max)
    }

    /// Kolmogorov-Smirnov distance that only one sample in a thousand exceeds, which is 1.95 / sqrt([`DRAW_COUNT`]).
    const MAX_KS_DISTANCE: f64 = 1.95e-3;

    #[test]
    fn draws_follow_their_distributions() {
        let mut rng = seeded_rng(1, 0);
        assert!(kolmogorov_smirnov_distance(|| draw_uniform_below_one(&mut rng), |x| x) < MAX_KS_DISTANCE);
        assert!(kolmogorov_smirnov_distance(|| draw_exponential(&mut rng), |x| 1.0 - libm::exp(-x)) < MAX_KS_DISTANCE);
        let compute_normal_distribution = |x: f64| 0.5 * libm::erfc(-x / 2f64.sqrt());
        assert!(
            kolmogorov_smirnov_distance(|| draw_standard_normal(&mut rng), compute_normal_distribution)
                < MAX_KS_DISTANCE
        );
        assert!(
            kolmogorov_smirnov_distance(
                || draw_log_normal(&mut rng, 1.0, 0.5),
                |x| compute_normal_distribution((libm::log(x) - 1.0) / 0.5)
            ) < MAX_KS_DISTANCE
        );
    }

    #[test]
    fn distribution_tails_have_the_expected_probability() {
        let mut rng = seeded_rng(2, 0);
        let assert_tail_probability = |tail_probability: f64, count: usize| {
            let expected_count = tail_probability * 10.0 * DRAW_COUNT as f64;
            assert!((count as f64 - expected_count).abs() < 4.0 * expected_count.sqrt(), "{count} of {expected_count}");
        };
        assert_tail_probability(
            libm::exp(-8.0),
            (0..10 * DRAW_COUNT).filter(|_| draw_exponential(&mut rng) > 8.0).count(),
        );
        let probability_beyond_four = libm::erfc(4.0 / 2f64.sqrt());
        assert_tail_probability(
            probability_beyond_four,
            (0..10 * DRAW_COUNT).filter(|_| draw_standard_normal(&mut rng).abs() > 4.0).count(),
        );
    }

    #[test]
    fn ziggurat_layers_have_equal_areas() {
        for ziggurat in [&*EXPONENTIAL_ZIGGURAT, &*NORMAL_ZIGGURAT] {
            let area = ziggurat.layer_ends[0] * ziggurat.layer_heights[1];
            for layer in 1..ZIGGURAT_LAYER_COUNT {
                let layer_area =
                    ziggurat.layer_ends[layer] * (ziggurat.layer_heights[layer + 1] - ziggurat.layer_heights[layer]);
                assert!((layer_area / area - 1.0).abs() < 1e-8, "layer {layer}: {layer_area} against {area}");
            }
        }
    }
}
