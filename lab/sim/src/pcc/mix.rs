//! Kinds of connections to a web server, by duration and size, with their relative frequencies.

use coreward_model::rss::uniform_below;

use super::simulated_nanoseconds::Nanoseconds;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ConnectionKind {
    pub duration: Nanoseconds,
    /// Number of packets that the server sends, at least 1 and at equal intervals. The client acknowledges each packet.
    pub packet_count: u32,
}

/// Connections of Cheetah's large web server (Barbette et al., NSDI'20, Sect. 2.1 and 5.3), each with duration (us),
/// size (bytes) and count. They are grouped from the 908 requests in `includes/duration_high.path` of
/// github.com/cheetahlb/experiments. The median duration is 0.54 s, the mean 26.3 s, and the maximum 150 s.
const WEB_SERVER_CONNECTIONS: [(u64, f64, u16); 33] = [
    (1_015, 58.988, 1),
    (1_015, 83.440, 11),
    (1_015, 157.041, 87),
    (1_015, 301.657, 63),
    (1_015, 314.218, 7),
    (1_969, 301.657, 40),
    (3_031, 301.657, 1),
    (3_031, 502.339, 12),
    (4_811, 502.339, 9),
    (36_184, 502.339, 1),
    (36_184, 654.890, 52),
    (60_153, 654.890, 23),
    (60_153, 1_283.888, 5),
    (75_787, 1_283.888, 31),
    (127_945, 1_283.888, 17),
    (151_566, 1_283.888, 36),
    (151_566, 1_421.752, 4),
    (203_091, 1_421.752, 17),
    (544_234, 1_421.752, 57),
    (1_329_675, 1_421.752, 29),
    (1_329_675, 2_227.049, 61),
    (2_578_524, 2_227.049, 37),
    (20_309_176, 2_227.049, 2),
    (20_309_176, 3_150.205, 56),
    (50_389_626, 3_150.205, 47),
    (50_389_626, 5_809.244, 18),
    (51_171_730, 5_809.244, 38),
    (81_226_735, 5_809.244, 5),
    (81_226_735, 9_873.313, 39),
    (81_226_735, 21_876.501, 15),
    (139_255_612, 21_876.501, 35),
    (139_255_612, 54_783.396, 24),
    (150_403_355, 54_783.396, 28),
];

/// Number of bytes that the experiment's server sends in each write (`includes/httpserver.py`).
const RESPONSE_BYTES_PER_PACKET: f64 = 125.0;

#[derive(Debug, Clone)]
pub struct ConnectionMix {
    kinds: Vec<ConnectionKind>,
    /// Indices of the connection kinds, each repeated as often as its weight.
    weighted_kind_indices: Vec<u8>,
    mean_duration_ns: f64,
}

impl ConnectionMix {
    pub fn for_web_server() -> Self {
        let to_connection_kind = |(microseconds, bytes, _): &(u64, f64, u16)| ConnectionKind {
            duration: microseconds * 1_000,
            packet_count: ((bytes / RESPONSE_BYTES_PER_PACKET) as u32).max(1),
        };
        let indexed_entries = WEB_SERVER_CONNECTIONS.iter().enumerate();
        let weighted_kind_indices = indexed_entries
            .flat_map(|(kind, (.., weight))| std::iter::repeat_n(kind as u8, usize::from(*weight)))
            .collect();
        Self::new(WEB_SERVER_CONNECTIONS.iter().map(to_connection_kind).collect(), weighted_kind_indices)
    }

    /// Returns a mix whose connections all last `seconds`.
    #[cfg(test)]
    pub fn with_constant_duration(seconds: f64) -> Self {
        Self::new(
            vec![ConnectionKind {
                duration: super::simulated_nanoseconds::seconds_to_nanoseconds(seconds),
                packet_count: 1,
            }],
            vec![0],
        )
    }

    fn new(kinds: Vec<ConnectionKind>, weighted_kind_indices: Vec<u8>) -> Self {
        let total_duration: u128 =
            weighted_kind_indices.iter().map(|kind| u128::from(kinds[usize::from(*kind)].duration)).sum();
        let mean_duration_ns = total_duration as f64 / weighted_kind_indices.len() as f64;
        Self { kinds, weighted_kind_indices, mean_duration_ns }
    }

    pub fn kinds(&self) -> &[ConnectionKind] {
        &self.kinds
    }

    /// Returns the indices of the kinds, each repeated as often as its weight.
    pub fn weighted_kind_indices(&self) -> &[u8] {
        &self.weighted_kind_indices
    }

    /// Draws a kind at random, in proportion to the weights, and returns its index.
    pub fn draw_kind(&self, rng: &mut impl rand::Rng) -> u8 {
        self.weighted_kind_indices[uniform_below(rng, self.weighted_kind_indices.len() as u32) as usize]
    }

    /// Returns the mean duration of connections (ns).
    pub fn mean_duration_ns(&self) -> f64 {
        self.mean_duration_ns
    }

    pub fn longest_duration(&self) -> Nanoseconds {
        self.kinds.iter().map(|kind| kind.duration).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pcc::simulated_nanoseconds::seconds_to_nanoseconds;

    #[test]
    fn web_server_mix_equals_the_published_one() {
        let mix = ConnectionMix::for_web_server();
        assert_eq!(mix.weighted_kind_indices().len(), 908);
        // The expected values are those of the file. Its mean size is 6.2 KB.
        assert!((mix.mean_duration_ns() / 1e9 - 26.3013).abs() < 1e-4, "{}", mix.mean_duration_ns());
        assert_eq!(
            mix.kinds()[usize::from(mix.weighted_kind_indices()[454])].duration,
            seconds_to_nanoseconds(0.544234)
        );
        assert_eq!(mix.longest_duration(), 150_403_355_000);
        let bytes: f64 = WEB_SERVER_CONNECTIONS.iter().map(|(_, bytes, weight)| bytes * f64::from(*weight)).sum();
        assert!((bytes / 908.0 - 6_200.0).abs() < 50.0, "{}", bytes / 908.0);
    }
}
