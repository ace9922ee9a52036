//! Loads of one server's cores, and histograms of many servers' loads, which racks can add up.

use super::ServerWeight;
use crate::load::CoreLoads;

/// Smoothed loads of one server's cores, as fractions of their capacity.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerLoads {
    /// Load of each core, by receive queue, as reported by the server's agent.
    Local(CoreLoads),
    /// Load of each core, as sent by the server's rack controller, after
    /// [`Policy::preprocess_pool`](super::PlacementPolicy::preprocess_pool).
    Relayed(CoreLoads),
    /// Sum of the cores' loads. The cores themselves are in the rack's summary ([`super::RackSummary`]).
    Aggregated {
        /// Sum of the loads of all cores.
        sum: f64,
        /// Number of cores, at least 1.
        core_count: u32,
    },
}

impl From<Vec<f64>> for ServerLoads {
    fn from(cores: Vec<f64>) -> Self {
        Self::Local(cores.into())
    }
}

impl ServerLoads {
    /// Returns the load of each core, or `None` if only the sum is known.
    pub fn core_loads(&self) -> Option<&CoreLoads> {
        match self {
            ServerLoads::Local(cores) | ServerLoads::Relayed(cores) => Some(cores),
            ServerLoads::Aggregated { .. } => None,
        }
    }

    /// Returns the sum of all cores' loads, added in order so that the controller and rack controllers get the same
    /// number.
    pub fn load_sum(&self) -> f64 {
        match self {
            ServerLoads::Local(cores) | ServerLoads::Relayed(cores) => cores.load_sum(),
            ServerLoads::Aggregated { sum, .. } => *sum,
        }
    }

    /// Returns the number of cores of the server.
    pub fn core_count(&self) -> u32 {
        match self {
            ServerLoads::Local(cores) | ServerLoads::Relayed(cores) => cores.len() as u32,
            ServerLoads::Aggregated { core_count, .. } => *core_count,
        }
    }

    /// Returns the mean load of all cores, or `None` if the server has no cores.
    pub fn mean_load(&self) -> Option<f64> {
        (self.core_count() > 0).then(|| self.load_sum() / f64::from(self.core_count()))
    }
}

/// Class of servers whose cores have the same target load and speed in [`super::normalized_load::NormalizedLoad`].
#[derive(Debug, Clone, Copy)]
pub struct ServerLoadClass {
    /// Weight of each server of the class.
    pub weight: ServerWeight,
    /// Speed of each core (above 0): the server's configured capacity divided by its number of cores, or 1.
    pub relative_core_speed: f64,
}

impl ServerLoadClass {
    /// Returns integers that sort like weight and speed. The speed is a positive number, whose bits sort like its
    /// value.
    fn sort_key(&self) -> (u32, u64) {
        (self.weight.get(), self.relative_core_speed.to_bits())
    }
}

impl PartialEq for ServerLoadClass {
    fn eq(&self, other: &Self) -> bool {
        self.sort_key() == other.sort_key()
    }
}

impl Eq for ServerLoadClass {}

impl PartialOrd for ServerLoadClass {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ServerLoadClass {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.sort_key().cmp(&other.sort_key())
    }
}

/// Number of mantissa bits of a load that select its bin. With 7 bits, there are 128 bins between a load and its
/// double.
const LOAD_BIN_MANTISSA_BITS: u32 = 7;
const F64_MANTISSA_BITS: u32 = f64::MANTISSA_DIGITS - 1;
/// Minimum load with a bin of its own. Smaller loads, of cores busy for less than 0.025 % of the time, share one bin.
const MIN_DISTINCT_LOAD: f64 = 1.0 / 4096.0;
/// Maximum load with a bin of its own. Larger loads share the last bin.
const MAX_DISTINCT_LOAD: f64 = 16.0;
/// Units of load per core in the sums of bins. The sum of a million cores at the data plane's highest load (2^12) is
/// below 2^64.
const LOAD_UNITS_PER_CORE: f64 = (1u64 << 32) as f64;

/// Histogram of the loads of many cores in some 2,000 bins. Each bin has the number of its cores and the sum of their
/// loads, and is at most 1/128 of its loads wide. Sums are whole numbers, so histograms of several sets of cores add up
/// exactly, in any order, and can also be subtracted.
#[derive(Debug, Clone, Default)]
pub struct LoadHistogram {
    /// Bins by index, up to the last one that has been used.
    bins: Vec<LoadHistogramBin>,
}

impl PartialEq for LoadHistogram {
    fn eq(&self, other: &Self) -> bool {
        self.bins().eq(other.bins())
    }
}

impl Eq for LoadHistogram {}

/// Form in which rack controllers send a [`LoadHistogram`]. It has only the nonempty bins, in ascending order of load.
/// These are a few hundred of 2,000, which saves memory and time with hundreds of racks.
pub type LoadHistogramBins = Vec<(u16, LoadHistogramBin)>;

/// Number of the cores in one bin, and the sum of their loads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadHistogramBin {
    /// Number of cores in the bin.
    pub core_count: u64,
    /// Sum of the cores' loads, in units of 2^-32 cores.
    pub load_sum: u64,
}

impl LoadHistogramBin {
    fn with_core_load(load: f64) -> Self {
        Self { core_count: 1, load_sum: (load * LOAD_UNITS_PER_CORE) as u64 }
    }
}

impl LoadHistogram {
    /// Maximum number of bins of a histogram.
    pub const BIN_COUNT: u16 = (load_prefix_bits(MAX_DISTINCT_LOAD) - load_prefix_bits(MIN_DISTINCT_LOAD)) as u16 + 2;

    /// Counts a core with the load `load` in its bin.
    pub fn add_core(&mut self, load: f64) {
        self.add_bin(load_bin_index(load), LoadHistogramBin::with_core_load(load));
    }

    /// Removes a core that was added with the load `load`.
    pub fn remove_core(&mut self, load: f64) {
        let (stored_bin, removed_bin) =
            (&mut self.bins[usize::from(load_bin_index(load))], LoadHistogramBin::with_core_load(load));
        stored_bin.core_count -= removed_bin.core_count;
        stored_bin.load_sum -= removed_bin.load_sum;
    }

    /// Adds the core counts and load sums of another histogram, given as its bins.
    pub fn add_bins(&mut self, other_bins: impl Iterator<Item = (u16, LoadHistogramBin)>) {
        other_bins.for_each(|(bin, added_bin)| self.add_bin(bin, added_bin));
    }

    /// Subtracts the core counts and load sums of another histogram, given as its bins, which were added before.
    pub fn remove_bins(&mut self, other_bins: impl Iterator<Item = (u16, LoadHistogramBin)>) {
        for (bin, removed_bin) in other_bins {
            let stored_bin = &mut self.bins[usize::from(bin)];
            stored_bin.core_count = stored_bin.core_count.saturating_sub(removed_bin.core_count);
            stored_bin.load_sum = stored_bin.load_sum.saturating_sub(removed_bin.load_sum);
        }
    }

    /// Adds the cores of `added_bin` to the bin with index `bin_index`, which is below [`LoadHistogram::BIN_COUNT`].
    pub fn add_bin(&mut self, bin_index: u16, added_bin: LoadHistogramBin) {
        let bin_position = usize::from(bin_index);
        if bin_position >= self.bins.len() {
            self.bins.resize(bin_position + 1, LoadHistogramBin::default());
        }
        let stored_bin = &mut self.bins[bin_position];
        stored_bin.core_count = stored_bin.core_count.saturating_add(added_bin.core_count);
        stored_bin.load_sum = stored_bin.load_sum.saturating_add(added_bin.load_sum);
    }

    /// Returns the nonempty bins in ascending order of load.
    pub fn bins(&self) -> impl Iterator<Item = (u16, LoadHistogramBin)> {
        let indexed_bins = self.bins.iter().enumerate().map(|(bin, cores)| (bin as u16, *cores));
        indexed_bins.filter(|(_, bin)| bin.core_count > 0)
    }

    /// Returns the total load by which cores are below the target load. The cores of one bin count with their mean
    /// load. Only the bin of the target load is inexact. Each core in it adds an error of at most a quarter of the
    /// bin's width (target load / 512).
    pub fn load_deficit_to_target(&self, target_load: f64) -> f64 {
        let load_missing_in_bin = |bin: &LoadHistogramBin| {
            (bin.core_count as f64 * target_load - bin.load_sum as f64 / LOAD_UNITS_PER_CORE).max(0.0)
        };
        self.bins.iter().map(load_missing_in_bin).sum()
    }
}

/// Returns the sign, the exponent and the first mantissa bits of a load. They grow with the load.
const fn load_prefix_bits(load: f64) -> u64 {
    load.to_bits() >> (F64_MANTISSA_BITS - LOAD_BIN_MANTISSA_BITS)
}

fn load_bin_index(load: f64) -> u16 {
    if load < MIN_DISTINCT_LOAD {
        return 0;
    }
    (load_prefix_bits(load.min(MAX_DISTINCT_LOAD)) - load_prefix_bits(MIN_DISTINCT_LOAD)) as u16 + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn create_histogram(loads: &[f64]) -> LoadHistogram {
        let mut histogram = LoadHistogram::default();
        loads.iter().for_each(|load| histogram.add_core(*load));
        histogram
    }

    #[test]
    fn bin_indexes_grow_with_the_load() {
        let loads =
            [0.0, MIN_DISTINCT_LOAD / 2.0, MIN_DISTINCT_LOAD, 0.001, 0.5, 0.503, 0.504, 1.0, 15.9, 16.0, 4_000.0];
        let bin_indexes = loads.map(load_bin_index);
        assert!(
            bin_indexes.is_sorted()
                && bin_indexes[0] == bin_indexes[1]
                && bin_indexes[1] < bin_indexes[2]
                && bin_indexes[8] < bin_indexes[9],
            "{bin_indexes:?}"
        );
        assert_eq!((bin_indexes[4], bin_indexes[9]), (bin_indexes[5], bin_indexes[10]));
        assert!(bin_indexes[10] < LoadHistogram::BIN_COUNT);
    }

    proptest! {
        #[test]
        fn part_histograms_add_up_to_the_whole_histogram(loads in proptest::collection::vec(0.0..2.0f64, 0..200),
            part_count in 1usize..7) {
            let mut added_histogram = LoadHistogram::default();
            for part_index in 0..part_count {
                let part_loads: Vec<f64> = loads.iter().copied().skip(part_index).step_by(part_count).collect();
                added_histogram.add_bins(create_histogram(&part_loads).bins());
            }
            prop_assert_eq!(added_histogram, create_histogram(&loads));
        }

        #[test]
        fn removed_cores_leave_no_trace_in_the_histogram(loads in proptest::collection::vec(0.0..20.0f64, 0..100),
            remaining_count in 0usize..100) {
            let (remaining_loads, removed_loads) = loads.split_at(remaining_count.min(loads.len()));
            let mut histogram = create_histogram(&loads);
            removed_loads.iter().for_each(|load| histogram.remove_core(*load));
            prop_assert_eq!(&histogram, &create_histogram(remaining_loads));
            prop_assert_eq!(
                histogram.load_deficit_to_target(0.7),
                create_histogram(remaining_loads).load_deficit_to_target(0.7),
            );
        }

        #[test]
        fn load_deficit_to_target_is_nearly_exact(
            loads in proptest::collection::vec(0.0..2.0f64, 1..200),
            target_load in 0.001..2.0f64,
        ) {
            let exact_missing_load: f64 = loads.iter().map(|load| (target_load - load).max(0.0)).sum();
            let missing_load = create_histogram(&loads).load_deficit_to_target(target_load);
            let core_count_in_target_bin =
                loads.iter().filter(|load| load_bin_index(**load) == load_bin_index(target_load)).count();
            let rounding_error = 1e-9 * loads.len() as f64;
            prop_assert!(missing_load <= exact_missing_load + rounding_error, "{missing_load} is more than \
                                                                               {exact_missing_load}");
            prop_assert!(
                exact_missing_load - missing_load
                    <= core_count_in_target_bin as f64 * target_load / 512.0 + rounding_error,
                "{missing_load}, {exact_missing_load}"
            );
        }
    }
}
