//! Loads of one server's cores, and histograms of many servers' loads, which racks can add up.

use super::ServerWeight;
use crate::load::CoreLoads;

/// Smoothed loads of one server's cores, as fractions of their capacity.
#[derive(Debug, Clone, PartialEq)]
pub enum ServerLoads {
    /// Load of each core, by receive queue, reported by the server's agent.
    Local(CoreLoads),
    /// Load of each core, from the server's rack controller, after [`Policy::preprocess`](super::Policy::preprocess).
    Relayed(CoreLoads),
    /// Only the sum of the loads, because the cores themselves are in the rack's summary ([`super::RackSummary`]).
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
    pub fn cores(&self) -> Option<&CoreLoads> {
        match self {
            ServerLoads::Local(cores) | ServerLoads::Relayed(cores) => Some(cores),
            ServerLoads::Aggregated { .. } => None,
        }
    }

    /// Returns the sum of all cores' loads, added in their order so that the controller and racks get the same number.
    pub fn sum(&self) -> f64 {
        match self {
            ServerLoads::Local(cores) | ServerLoads::Relayed(cores) => cores.sum(),
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

    /// Returns the mean load of all cores, or `None` without cores.
    pub fn mean(&self) -> Option<f64> {
        (self.core_count() > 0).then(|| self.sum() / f64::from(self.core_count()))
    }
}

/// Class of servers whose cores have the same fair level and speed in [`super::normalized_load::NormalizedLoad`].
#[derive(Debug, Clone, Copy)]
pub struct ServerClass {
    /// Weight of each server of the class.
    pub weight: ServerWeight,
    /// Speed of each core (above 0), relative to a core of usual speed.
    pub speed: f64,
}

impl ServerClass {
    /// Returns integers that sort like weight and speed, because the speed is a positive floating-point number.
    fn sort_key(&self) -> (u32, u64) {
        (self.weight.get(), self.speed.to_bits())
    }
}

impl PartialEq for ServerClass {
    fn eq(&self, other: &Self) -> bool {
        self.sort_key() == other.sort_key()
    }
}

impl Eq for ServerClass {}

impl PartialOrd for ServerClass {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ServerClass {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.sort_key().cmp(&other.sort_key())
    }
}

/// Number of mantissa bits of a load that select its bin, which gives 128 bins from a load to its double.
const BIN_MANTISSA_BITS: u32 = 7;
const MANTISSA_BITS: u32 = f64::MANTISSA_DIGITS - 1;
/// Minimum load with its own bin. Smaller loads, of cores busy for less than 0.025 % of the time, share one bin.
const MIN_DISTINCT_LOAD: f64 = 1.0 / 4096.0;
/// Maximum load with a bin of its own. Larger loads share the last bin.
const MAX_DISTINCT_LOAD: f64 = 16.0;
/// Units per core in the sums of bins. A million cores at the data plane's highest load (2^12) stay below 2^64.
const LOAD_UNITS_PER_CORE: f64 = (1u64 << 32) as f64;

/// Histogram of many cores' loads in some 2,000 bins, which have the number of cores and the sum of their loads. A bin
/// is as wide as 1/128 of its loads. Sums are whole numbers, so histograms of several sets of cores add up exactly, in
/// any order, and can also be subtracted.
#[derive(Debug, Clone, Default)]
pub struct LoadHistogram {
    /// Bins by index, up to the last one that has been used.
    bins: Vec<LoadBin>,
}

impl PartialEq for LoadHistogram {
    fn eq(&self, other: &Self) -> bool {
        self.bins().eq(other.bins())
    }
}

impl Eq for LoadHistogram {}

/// Form in which racks send a [`LoadHistogram`]. It has only the bins with a core, in ascending order of load. These
/// are a few hundred of 2,000, which matters because hundreds of racks are kept and added up.
pub type HistogramBins = Vec<(u16, LoadBin)>;

/// Number and loads of the cores in one bin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LoadBin {
    /// Number of cores in the bin.
    pub core_count: u64,
    /// Sum of the cores' loads in units of 2^-32 cores.
    pub load_sum: u64,
}

impl LoadBin {
    fn of(load: f64) -> Self {
        Self { core_count: 1, load_sum: (load * LOAD_UNITS_PER_CORE) as u64 }
    }
}

impl LoadHistogram {
    /// Maximum number of bins of a histogram.
    pub const BIN_COUNT: u16 = (bin_key(MAX_DISTINCT_LOAD) - bin_key(MIN_DISTINCT_LOAD)) as u16 + 2;

    /// Adds a core with this load.
    pub fn add_core(&mut self, load: f64) {
        self.add_bin(bin_index(load), LoadBin::of(load));
    }

    /// Removes a core that was added with this load.
    pub fn remove_core(&mut self, load: f64) {
        let (stored_bin, removed_bin) = (&mut self.bins[usize::from(bin_index(load))], LoadBin::of(load));
        stored_bin.core_count -= removed_bin.core_count;
        stored_bin.load_sum -= removed_bin.load_sum;
    }

    /// Adds all cores of another histogram.
    pub fn add_bins(&mut self, other: impl Iterator<Item = (u16, LoadBin)>) {
        other.for_each(|(bin, added_bin)| self.add_bin(bin, added_bin));
    }

    /// Removes all cores of another histogram that was added before.
    pub fn remove_bins(&mut self, other: impl Iterator<Item = (u16, LoadBin)>) {
        for (bin, removed_bin) in other {
            let stored_bin = &mut self.bins[usize::from(bin)];
            stored_bin.core_count = stored_bin.core_count.saturating_sub(removed_bin.core_count);
            stored_bin.load_sum = stored_bin.load_sum.saturating_sub(removed_bin.load_sum);
        }
    }

    /// Adds cores to the bin with index `bin`, which is below [`LoadHistogram::BIN_COUNT`].
    pub fn add_bin(&mut self, bin: u16, added_bin: LoadBin) {
        let position = usize::from(bin);
        if position >= self.bins.len() {
            self.bins.resize(position + 1, LoadBin::default());
        }
        let stored_bin = &mut self.bins[position];
        stored_bin.core_count = stored_bin.core_count.saturating_add(added_bin.core_count);
        stored_bin.load_sum = stored_bin.load_sum.saturating_add(added_bin.load_sum);
    }

    /// Returns the bins that have a core, in ascending order of load.
    pub fn bins(&self) -> impl Iterator<Item = (u16, LoadBin)> {
        let indexed_bins = self.bins.iter().enumerate().map(|(bin, cores)| (bin as u16, *cores));
        indexed_bins.filter(|(_, bin)| bin.core_count > 0)
    }

    /// Returns the total load by which cores are below `level`. The cores of one bin count with their mean load. Only
    /// the bin of `level` is inexact, where each core adds an error of at most a quarter of the bin's width (level /
    /// 512).
    pub fn missing_load(&self, level: f64) -> f64 {
        let missing_load_of_bin =
            |bin: &LoadBin| (bin.core_count as f64 * level - bin.load_sum as f64 / LOAD_UNITS_PER_CORE).max(0.0);
        self.bins.iter().map(missing_load_of_bin).sum()
    }
}

/// Returns the sign, the exponent and the first mantissa bits of a load, which grow with the load.
const fn bin_key(load: f64) -> u64 {
    load.to_bits() >> (MANTISSA_BITS - BIN_MANTISSA_BITS)
}

fn bin_index(load: f64) -> u16 {
    if load < MIN_DISTINCT_LOAD {
        return 0;
    }
    (bin_key(load.min(MAX_DISTINCT_LOAD)) - bin_key(MIN_DISTINCT_LOAD)) as u16 + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram_of(loads: &[f64]) -> LoadHistogram {
        let mut histogram = LoadHistogram::default();
        loads.iter().for_each(|load| histogram.add_core(*load));
        histogram
    }

    #[test]
    fn bin_indexes_grow_with_the_load() {
        let loads =
            [0.0, MIN_DISTINCT_LOAD / 2.0, MIN_DISTINCT_LOAD, 0.001, 0.5, 0.503, 0.504, 1.0, 15.9, 16.0, 4_000.0];
        let bin_indexes = loads.map(bin_index);
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
        fn histograms_of_parts_add_up_to_the_whole(loads in proptest::collection::vec(0.0..2.0f64, 0..200),
            part in 1usize..7) {
            let mut added_histogram = LoadHistogram::default();
            for of_part in 0..part {
                let part_loads: Vec<f64> = loads.iter().copied().skip(of_part).step_by(part).collect();
                added_histogram.add_bins(histogram_of(&part_loads).bins());
            }
            prop_assert_eq!(added_histogram, histogram_of(&loads));
        }

        #[test]
        fn removed_cores_leave_no_trace_in_the_histogram(loads in proptest::collection::vec(0.0..20.0f64, 0..100),
            part in 0usize..100) {
            let (remaining_loads, removed_loads) = loads.split_at(part.min(loads.len()));
            let mut sum = histogram_of(&loads);
            removed_loads.iter().for_each(|load| sum.remove_core(*load));
            prop_assert_eq!(&sum, &histogram_of(remaining_loads));
            prop_assert_eq!(sum.missing_load(0.7), histogram_of(remaining_loads).missing_load(0.7));
        }

        #[test]
        fn missing_load_is_nearly_exact(
            loads in proptest::collection::vec(0.0..2.0f64, 1..200),
            level in 0.001..2.0f64,
        ) {
            let exact_missing_load: f64 = loads.iter().map(|load| (level - load).max(0.0)).sum();
            let missing_load = histogram_of(&loads).missing_load(level);
            let cores_in_bin_of_level = loads.iter().filter(|load| bin_index(**load) == bin_index(level)).count();
            let rounding_error = 1e-9 * loads.len() as f64;
            prop_assert!(missing_load <= exact_missing_load + rounding_error, "{missing_load} is more than \
                                                                               {exact_missing_load}");
            prop_assert!(
                exact_missing_load - missing_load <= cores_in_bin_of_level as f64 * level / 512.0 + rounding_error,
                "{missing_load}, {exact_missing_load}"
            );
        }
    }
}
