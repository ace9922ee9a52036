//! `jbsrq`: bounded queues at the cores, ranked by what a request of that priority would have to wait for.

use super::{Dispatcher, Header, LeastTree, Release};

/// What a request of lower priority counts in the rank of one of higher priority: the cost of making it yield. From 0 to
/// 1, kept in thousandths so that ranks are whole numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lambda(u16);

/// A factor outside 0 to 1.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("lambda {0}: expected a number from 0 to 1")]
pub struct LambdaOutOfRange(pub f64);

/// What a request of at least the same priority counts.
const ONE: u32 = 1000;

impl Lambda {
    /// RingLeader's setting (NSDI'23, Sect. 7.1).
    pub const PUBLISHED: Lambda = Lambda(200);

    /// Rounded to thousandths.
    ///
    /// # Errors
    /// When `value` is not from 0 to 1.
    pub fn new(value: f64) -> Result<Self, LambdaOutOfRange> {
        if (0.0..=1.0).contains(&value) {
            Ok(Self((value * f64::from(ONE)).round() as u16))
        } else {
            Err(LambdaOutOfRange(value))
        }
    }

    /// The factor.
    pub fn get(self) -> f64 {
        f64::from(self.0) / f64::from(ONE)
    }
}

/// Join the bounded, shortest ranked queue, and first eligible out (RingLeader, NSDI'23, Sect. 4.2 and 4.3).
///
/// The rank of core c for service A is the number of requests under way there of at least A's priority, plus lambda times
/// the number of the others. A core takes a request while its rank for that service is below `depth` and the service runs
/// there; the request goes to the core of least rank. What no core takes waits at the NIC, in a queue per service;
/// first out is the service of highest priority that any core would take.
#[derive(Debug, Clone)]
pub struct JoinBoundedShortestRankedQueue {
    lambda: u32,
    bound: u32,
    services: Vec<Service>,
}

#[derive(Debug, Clone)]
struct Service {
    /// Rank of each core, in thousandths.
    ranks: Vec<u32>,
    /// Whether the service runs on the core.
    runs: Vec<bool>,
    /// The ranks of the cores that would take a request; [`FULL`] for the others.
    eligible: LeastTree<u32>,
    /// Requests that wait at the NIC.
    waiting: u64,
    waiting_peak: u64,
}

const FULL: u32 = u32::MAX;

impl JoinBoundedShortestRankedQueue {
    /// `services` services, each of which runs on all cores.
    pub fn new(cores: u16, services: u8, lambda: Lambda, depth: std::num::NonZeroU16) -> Self {
        let service = Service {
            ranks: vec![0; usize::from(cores)],
            runs: vec![true; usize::from(cores)],
            eligible: LeastTree::new(cores, 0),
            waiting: 0,
            waiting_peak: 0,
        };
        Self {
            lambda: u32::from(lambda.0),
            bound: u32::from(depth.get()) * ONE,
            services: vec![service; usize::from(services)],
        }
    }

    /// Says whether `service` runs on `core` (RingLeader's EnableService and DisableService). Requests that went there
    /// before stay there.
    pub fn set_runs(&mut self, service: u8, core: u16, runs: bool) {
        let entry = &mut self.services[usize::from(service)];
        entry.runs[usize::from(core)] = runs;
        entry.judge(core, self.bound);
    }

    /// Whether `service` runs on `core`.
    pub fn runs(&self, service: u8, core: u16) -> bool {
        self.services[usize::from(service)].runs[usize::from(core)]
    }

    /// How many requests of `service` wait at the NIC.
    pub fn waiting(&self, service: u8) -> u64 {
        self.services[usize::from(service)].waiting
    }

    /// The most requests of `service` that waited at once since this was last asked.
    pub fn take_waiting_peak(&mut self, service: u8) -> u64 {
        let entry = &mut self.services[usize::from(service)];
        std::mem::replace(&mut entry.waiting_peak, entry.waiting)
    }

    /// How many requests `core` has under way, in thousandths: its rank for the lowest priority.
    pub fn under_way(&self, core: u16) -> u32 {
        self.services.last().map_or(0, |lowest| lowest.ranks[usize::from(core)])
    }

    /// A request of `service` more, or less, at `core`.
    #[inline]
    fn count(&mut self, service: u8, core: u16, change: impl Fn(&mut u32, u32)) {
        for (priority, entry) in self.services.iter_mut().enumerate() {
            // A lower number is a higher priority: those of at least this entry's priority count in full.
            let weight = if usize::from(service) <= priority { ONE } else { self.lambda };
            change(&mut entry.ranks[usize::from(core)], weight);
            entry.judge(core, self.bound);
        }
    }

    #[inline]
    fn send(&mut self, service: u8) -> Option<u16> {
        let (core, rank) = self.services[usize::from(service)].eligible.least();
        if rank == FULL {
            return None;
        }
        self.count(service, core, |rank, weight| *rank += weight);
        Some(core)
    }
}

impl Service {
    #[inline]
    fn judge(&mut self, core: u16, bound: u32) {
        let rank = self.ranks[usize::from(core)];
        let eligible = self.runs[usize::from(core)] && rank < bound;
        self.eligible.set(core, if eligible { rank } else { FULL });
    }
}

impl Dispatcher for JoinBoundedShortestRankedQueue {
    #[inline]
    fn place(&mut self, _now: u64, header: &Header) -> Option<u16> {
        // A request never overtakes one of its own service.
        let core = if self.waiting(header.service) == 0 { self.send(header.service) } else { None };
        if core.is_none() {
            let entry = &mut self.services[usize::from(header.service)];
            entry.waiting += 1;
            entry.waiting_peak = entry.waiting_peak.max(entry.waiting);
        }
        core
    }

    #[inline]
    fn completed(&mut self, core: u16, header: &Header) {
        self.count(header.service, core, |rank, weight| *rank -= weight);
    }

    #[inline]
    fn release(&mut self) -> Option<Release> {
        for service in 0..self.services.len() as u8 {
            if self.waiting(service) > 0
                && let Some(core) = self.send(service)
            {
                self.services[usize::from(service)].waiting -= 1;
                return Some(Release { service, core });
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::header;
    use super::*;

    fn dispatcher(cores: u16, depth: u16) -> JoinBoundedShortestRankedQueue {
        JoinBoundedShortestRankedQueue::new(cores, 2, Lambda::PUBLISHED, depth.try_into().unwrap())
    }

    /// Sends a request of the service to the core of two by allowing no other.
    fn put(jbsrq: &mut JoinBoundedShortestRankedQueue, service: u8, core: u16) {
        (0..2).for_each(|other| jbsrq.set_runs(service, other, other == core));
        assert_eq!(jbsrq.place(0, &header(service, 1)), Some(core));
        (0..2).for_each(|other| jbsrq.set_runs(service, other, true));
    }

    #[test]
    fn low_priority_hardly_counts_for_high_priority() {
        // RingLeader, Fig. 5 (c): core 0 has three requests of low priority, core 1 one of high priority.
        let mut jbsrq = dispatcher(2, 4);
        (0..3).for_each(|_| put(&mut jbsrq, 1, 0));
        put(&mut jbsrq, 0, 1);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(0));
    }

    #[test]
    fn at_low_load_an_idle_core_is_better_than_one_with_low_priority() {
        // Fig. 5 (d).
        let mut jbsrq = dispatcher(2, 4);
        put(&mut jbsrq, 1, 0);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(1));
    }

    #[test]
    fn high_priority_counts_in_full_for_low_priority() {
        // Fig. 5 (e): core 0 has one of low, core 1 two of high priority.
        let mut jbsrq = dispatcher(2, 4);
        put(&mut jbsrq, 1, 0);
        (0..2).for_each(|_| put(&mut jbsrq, 0, 1));
        assert_eq!(jbsrq.place(0, &header(1, 1)), Some(0));
    }

    #[test]
    fn the_first_eligible_is_out_first() {
        let mut jbsrq = dispatcher(2, 1);
        // Service 0 may run on core 0 only, which is full: its request waits, and does not stop service 1's.
        jbsrq.set_runs(0, 1, false);
        assert_eq!(jbsrq.place(0, &header(0, 1)), Some(0));
        assert_eq!(jbsrq.place(0, &header(0, 1)), None);
        assert_eq!(jbsrq.place(0, &header(1, 1)), Some(1));
        assert_eq!(jbsrq.place(0, &header(1, 1)), None);
        assert_eq!(jbsrq.release(), None);
        // Core 1 becomes free: service 0 is first but not eligible there.
        jbsrq.completed(1, &header(1, 1));
        assert_eq!(jbsrq.release(), Some(Release { service: 1, core: 1 }));
        jbsrq.completed(0, &header(0, 1));
        assert_eq!(jbsrq.release(), Some(Release { service: 0, core: 0 }));
        assert_eq!((jbsrq.waiting(0), jbsrq.waiting(1), jbsrq.release()), (0, 0, None));
    }

    #[test]
    fn lambda_is_a_factor() {
        assert_eq!(Lambda::new(1.5).unwrap_err().to_string(), "lambda 1.5: expected a number from 0 to 1");
        assert!(Lambda::new(f64::NAN).is_err());
        assert_eq!(Lambda::new(0.2), Ok(Lambda::PUBLISHED));
    }
}
