//! Dispatchers `random` and `rr`, which spread requests over the cores regardless of their load (d-FCFS(r) and
//! d-FCFS(rr) in Turbo, HPCA'23, Sect. III).

use super::{DispatchHeader, RequestDispatcher};

/// Dispatcher that selects a uniformly random core by a hash of the request's header.
#[derive(Debug, Clone)]
pub struct RandomDispatcher {
    core_count: u16,
}

impl RandomDispatcher {
    /// Returns a dispatcher for `core_count` cores.
    pub fn new(core_count: u16) -> Self {
        Self { core_count }
    }
}

impl RequestDispatcher for RandomDispatcher {
    #[inline]
    fn place_request(&mut self, _now: u64, header: &DispatchHeader) -> Option<u16> {
        Some(scale_hash(header.request_hash, self.core_count))
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}

/// Scales a hash to a number below `count`, by multiply and shift instead of a division (Lemire 2019).
pub(super) fn scale_hash(hash: u32, count: u16) -> u16 {
    ((u64::from(hash) * u64::from(count)) >> 32) as u16
}

/// Dispatcher that selects the cores in cyclic order.
#[derive(Debug, Clone)]
pub struct RoundRobinDispatcher {
    core_count: u16,
    next_core_index: u16,
}

impl RoundRobinDispatcher {
    /// Returns a dispatcher for `core_count` cores.
    pub fn new(core_count: u16) -> Self {
        Self { core_count, next_core_index: 0 }
    }
}

impl RequestDispatcher for RoundRobinDispatcher {
    #[inline]
    fn place_request(&mut self, _now: u64, _header: &DispatchHeader) -> Option<u16> {
        let core = self.next_core_index;
        self.next_core_index = if core + 1 < self.core_count { core + 1 } else { 0 };
        Some(core)
    }

    #[inline]
    fn record_completion(&mut self, _core: u16, _header: &DispatchHeader) {}
}

#[cfg(test)]
mod tests {
    use super::super::tests::build_dispatch_header;
    use super::*;

    #[test]
    fn random_dispatcher_reaches_all_cores_equally() {
        let mut random = RandomDispatcher::new(3);
        let mut request_count_by_core = [0; 3];
        for hash in (0..=u32::MAX).step_by(1 << 20) {
            request_count_by_core[usize::from(
                random.place_request(0, &DispatchHeader { request_hash: hash, ..build_dispatch_header(0, 1) }).unwrap(),
            )] += 1;
        }
        assert_eq!(request_count_by_core, [1366, 1365, 1365]);
    }

    #[test]
    fn round_robin_selects_all_cores_in_cyclic_order() {
        let mut round_robin = RoundRobinDispatcher::new(3);
        let placed_cores: Vec<_> =
            (0..5).map(|_| round_robin.place_request(0, &build_dispatch_header(0, 1)).unwrap()).collect();
        assert_eq!(placed_cores, [0, 1, 2, 0, 1]);
    }
}
