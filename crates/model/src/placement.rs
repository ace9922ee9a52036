//! Placement tables, by which the data plane selects servers for new connections, and the selection itself.
//!
//! A policy computes a [`PlacementTable`], the controller sends it, and `lb.bpf.c` reads it (`struct placement_table`
//! of `bpf/include/intf.h`). [`PlacementTable::select_server`] decides as `lb.bpf.c` does, and the tests of the BPF
//! program compare the two.

mod random;

use std::collections::HashMap;
use std::time::Duration;

use coreward_intf as intf;

use crate::rss::RssKey;
use crate::{FourTuple, ServerId};

/// Default time for which a placement table is valid. A restarted or newly elected controller sends a new table sooner.
pub const DEFAULT_PLACEMENT_TABLE_LIFETIME: Duration = Duration::from_secs(10);

/// Number of buckets in a placement table, a power of two from 1 to 2048.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BucketCount(u32);

/// Error returned for a number of buckets that is not a power of two from 1 to 2048.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0} buckets: expected a power of two from 1 to {max}", max = intf::MAX_BUCKETS)]
pub struct BucketCountError(pub u64);

impl BucketCount {
    /// Number of buckets in the CrossRSS paper (CoNEXT'20). Most NICs' indirection tables have as many entries.
    pub const PAPER_VALUE: BucketCount = BucketCount(128);

    /// Returns the number `count` as a number of buckets. Fails if `count` is not a power of two from 1 to 2048.
    pub fn new(count: u64) -> Result<Self, BucketCountError> {
        if count.is_power_of_two() && count <= u64::from(intf::MAX_BUCKETS) {
            Ok(Self(count as u32))
        } else {
            Err(BucketCountError(count))
        }
    }

    /// Returns the number of buckets.
    pub fn get(self) -> u32 {
        self.0
    }

    /// Returns the bucket that a hash selects by its low bits.
    pub fn bucket_of_hash(self, hash: u32) -> u32 {
        hash & (self.0 - 1)
    }
}

/// Rule by which the data plane selects the server of a new connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PlacementRule {
    /// Selects the server of the connection's bucket, by one look-up.
    Table,
    /// Selects the bucket's candidate of least load. The load includes the connections assigned since the table was
    /// installed.
    LeastAssigned,
    /// Selects the table's members in cyclic order.
    RoundRobin,
    /// Selects the less loaded of two members that are drawn by hash.
    PowerOfTwo,
}

impl PlacementRule {
    /// All placement rules in the order of `enum placement_rule`.
    pub const ALL: [PlacementRule; intf::PLACEMENT_RULE_COUNT as usize] =
        [PlacementRule::Table, PlacementRule::LeastAssigned, PlacementRule::RoundRobin, PlacementRule::PowerOfTwo];

    /// Returns the rule's value in `enum placement_rule`.
    pub fn bpf_number(self) -> u32 {
        self as u32
    }

    /// Returns the rule's name, which is its name in `bpf/include/intf.h` in lower case.
    pub fn name(self) -> &'static str {
        intf::PLACEMENT_RULE_NAMES[self as usize]
    }

    /// Returns the rule whose name is `name`, or `None` if there is no such rule.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name)
    }
}

/// Core of a server that is a candidate for the connections of a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CandidateCore {
    /// Server to which the core belongs.
    pub server: ServerId,
    /// Load of the core as a fixed-point number ([`crate::load::load_to_fixed_point`]).
    pub fixed_point_load: u32,
    /// Index of the core in [`PlacementTable::core_slots`].
    pub core_slot: u16,
}

/// Server that takes new connections, with its mean load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlacementTableMember {
    /// Id of the server.
    pub server: ServerId,
    /// Mean load of the server's cores as a fixed-point number.
    pub fixed_point_load: u32,
}

/// Core of a server, identified by its receive queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServerCore {
    /// Server to which the core belongs.
    pub server: ServerId,
    /// Number of the receive queue that the core serves.
    pub core: u16,
}

/// Placement table, by which new connections of one service are assigned to servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementTable {
    /// Generation number, which grows with every table of the service.
    pub generation: u64,
    /// Rule by which servers are selected.
    pub rule: PlacementRule,
    /// Number of buckets in each group.
    pub bucket_count: BucketCount,
    /// RSS key of each group of servers that share buckets, by which connections are hashed to buckets.
    pub rss_key_by_group: Vec<RssKey>,
    /// Number of candidates for each bucket of a group. If too few exist, the last candidate is repeated.
    pub candidates_per_bucket: u32,
    /// Candidates by group, bucket and rank, the best first. Their number is the number of groups x `bucket_count` x
    /// `candidates_per_bucket`.
    pub candidates: Vec<CandidateCore>,
    /// Load (fixed-point number) that each connection assigned since the table was installed adds to its core.
    pub assignment_cost: u32,
    /// Core of each core slot. A slot counts the connections assigned to its core.
    pub core_slots: Vec<ServerCore>,
    /// Servers that take new connections, by id. Under [`PlacementRule::RoundRobin`], they are in the order of
    /// selection, and servers of more weight occur several times.
    pub members: Vec<PlacementTableMember>,
    /// Server of each bucket for connections that cannot carry a cookie. It changes only if the pool of servers
    /// changes.
    pub consistent_server_by_bucket: Vec<ServerId>,
    /// Previous server of each bucket, which may still have connections of the bucket (daisy chaining in Beamer,
    /// NSDI'18, Sect. 4.2). The list is empty if no bucket has moved.
    pub previous_consistent_server_by_bucket: Vec<Option<ServerId>>,
    /// Servers that are down, by id. SYNs and UDP packets of their flows go to other servers.
    pub down_servers: Vec<ServerId>,
    /// Age of the load of each core slot ([`PlacementTable::core_slots`]), as a number of tables. A load of age 0 is
    /// new. An old load does not include connections assigned since. The list is empty if all loads are new.
    pub load_age_by_core_slot: Vec<u32>,
}

/// Core slot of each core of a table, by which the next table takes over counts of assigned connections.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CoreSlotIndex {
    /// Generation number of the indexed table.
    pub generation: u64,
    slot_by_core: HashMap<ServerCore, u16, foldhash::fast::FixedState>,
}

impl CoreSlotIndex {
    /// Returns the core slot of each core of `table`.
    pub fn from_table(table: &PlacementTable) -> Self {
        let slots = table.core_slots.iter().enumerate().map(|(slot, core)| (*core, slot as u16));
        Self { generation: table.generation, slot_by_core: slots.collect() }
    }

    /// Returns the initial counts of assigned connections of `next_table`. A count is 0, or that of this table if the
    /// core has no newer load. `assigned_count_of_slot` returns this table's count.
    pub fn initial_connection_counts(
        &self,
        next_table: &PlacementTable,
        assigned_count_of_slot: impl Fn(u16) -> u32,
    ) -> Vec<u32> {
        let initial_assigned_count = |(slot, core): (usize, &ServerCore)| {
            let load_age_tables = next_table.load_age_by_core_slot.get(slot).copied().unwrap_or(0);
            let is_newer_table = next_table.generation > self.generation;
            let is_count_needed = load_age_tables > 0
                && is_newer_table
                && next_table.generation.saturating_sub(load_age_tables.into()) <= self.generation;
            self.slot_by_core.get(core).filter(|_| is_count_needed).map_or(0, |slot| assigned_count_of_slot(*slot))
        };
        next_table.core_slots.iter().enumerate().map(initial_assigned_count).collect()
    }
}

/// State of a placement table that changes with each new connection.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementTableState {
    /// Number of connections assigned since the table was installed, by core slot.
    pub assigned_connections_by_core_slot: Vec<u32>,
    /// Counter of placements by [`PlacementRule::RoundRobin`].
    pub round_robin_counter: u64,
}

impl PlacementTableState {
    /// Returns the initial state of a new table.
    pub fn for_table(table: &PlacementTable) -> Self {
        Self { assigned_connections_by_core_slot: vec![0; table.core_slots.len()], round_robin_counter: 0 }
    }
}

/// Mixes a Toeplitz hash into two independent 32-bit random numbers, by the 64-bit finaliser of MurmurHash3. Every
/// input bit affects every output bit. The hash's own low bits would depend on the bucket, and so on the core.
pub fn mix_hash(hash: u32) -> u64 {
    let mut x = u64::from(hash) | 0x9e37_79b9 << 32;
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ x >> 33
}

/// Returns two random numbers below `count` from a mixed hash, by multiply and shift (Lemire 2019).
pub fn draw_two_numbers_below(mixed_hash: u64, count: u32) -> (u32, u32) {
    let draw_below = |hash_half: u64| ((hash_half * u64::from(count)) >> 32) as u32;
    (draw_below(mixed_hash & 0xffff_ffff), draw_below(mixed_hash >> 32))
}

impl PlacementTable {
    /// Returns a table without eligible servers.
    pub fn empty(bucket_count: BucketCount) -> Self {
        Self {
            generation: 0,
            rule: PlacementRule::Table,
            bucket_count,
            rss_key_by_group: Vec::new(),
            candidates_per_bucket: 0,
            candidates: Vec::new(),
            assignment_cost: 0,
            core_slots: Vec::new(),
            members: Vec::new(),
            consistent_server_by_bucket: Vec::new(),
            previous_consistent_server_by_bucket: Vec::new(),
            down_servers: Vec::new(),
            load_age_by_core_slot: Vec::new(),
        }
    }

    /// Returns the server that the table selects for a new connection, or `None` if no server is eligible.
    pub fn select_server(&self, state: &mut PlacementTableState, tuple: &FourTuple) -> Option<ServerId> {
        let bytes = tuple.bytes();
        self.select_server_by_hash(state, |group| self.rss_key_by_group[group].toeplitz_hash(&bytes))
    }

    /// Selects a server like [`PlacementTable::select_server`]. `hash_of_group` returns the connection's Toeplitz hash
    /// under the key of each group ([`PlacementTable::rss_key_by_group`]), for callers that compute it faster.
    pub fn select_server_by_hash(
        &self,
        state: &mut PlacementTableState,
        hash_of_group: impl Fn(usize) -> u32,
    ) -> Option<ServerId> {
        self.select_server_and_count_connection(state, hash_of_group, |_| true)
    }

    /// Selects a server like [`PlacementTable::select_server_by_hash`], but counts the connection as assigned only if
    /// `can_take_connection` is true for the server. Otherwise the data plane sends the connection elsewhere.
    pub fn select_server_and_count_connection(
        &self,
        state: &mut PlacementTableState,
        hash_of_group: impl Fn(usize) -> u32,
        can_take_connection: impl Fn(ServerId) -> bool,
    ) -> Option<ServerId> {
        if self.members.is_empty() {
            return None;
        }
        match self.rule {
            PlacementRule::Table => self
                .find_least_cost_candidate(hash_of_group, |candidate| u64::from(candidate.fixed_point_load))
                .map(|c| c.server),
            PlacementRule::LeastAssigned => {
                self.choose_least_assigned_server(state, hash_of_group, can_take_connection)
            }
            PlacementRule::RoundRobin => {
                let placement_number = state.round_robin_counter;
                state.round_robin_counter += 1;
                Some(self.members[(placement_number % self.members.len() as u64) as usize].server)
            }
            PlacementRule::PowerOfTwo => {
                let (first_member, second_member) =
                    self.draw_two_members(if self.rss_key_by_group.is_empty() { 0 } else { hash_of_group(0) });
                Some(if second_member.fixed_point_load < first_member.fixed_point_load {
                    second_member.server
                } else {
                    first_member.server
                })
            }
        }
    }

    /// Returns the server of a connection without timestamps, which does not depend on the loads.
    pub fn select_consistent_server(&self, tuple: &FourTuple) -> Option<ServerId> {
        let key = self.rss_key_by_group.first()?;
        self.consistent_server_by_bucket
            .get(self.bucket_count.bucket_of_hash(key.toeplitz_hash(&tuple.bytes())) as usize)
            .copied()
    }

    /// Returns the candidates of a group's bucket, the best first.
    pub fn bucket_candidates(&self, group: usize, bucket: u32) -> &[CandidateCore] {
        let candidates_per_bucket = self.candidates_per_bucket as usize;
        let first_candidate_index =
            (group * self.bucket_count.get() as usize + bucket as usize) * candidates_per_bucket;
        &self.candidates[first_candidate_index..first_candidate_index + candidates_per_bucket]
    }

    fn choose_least_assigned_server(
        &self,
        state: &mut PlacementTableState,
        hash_of_group: impl Fn(usize) -> u32,
        can_take_connection: impl Fn(ServerId) -> bool,
    ) -> Option<ServerId> {
        let candidate_cost = |candidate: &CandidateCore| {
            let assigned_connection_count =
                state.assigned_connections_by_core_slot.get(usize::from(candidate.core_slot)).copied().unwrap_or(0);
            u64::from(candidate.fixed_point_load)
                + u64::from(assigned_connection_count) * u64::from(self.assignment_cost)
        };
        let least_candidate = self.find_least_cost_candidate(hash_of_group, candidate_cost)?;
        if let Some(assigned_count) = state
            .assigned_connections_by_core_slot
            .get_mut(usize::from(least_candidate.core_slot))
            .filter(|_| can_take_connection(least_candidate.server))
        {
            *assigned_count += 1;
        }
        Some(least_candidate.server)
    }

    /// Returns the first candidate of least cost among all groups. The rule `Table` uses only each bucket's first
    /// candidate.
    fn find_least_cost_candidate(
        &self,
        hash_of_group: impl Fn(usize) -> u32,
        cost: impl Fn(&CandidateCore) -> u64,
    ) -> Option<CandidateCore> {
        let candidate_count = if self.rule == PlacementRule::Table { 1 } else { self.candidates_per_bucket as usize };
        let candidates = (0..self.rss_key_by_group.len()).flat_map(|group| {
            let bucket = self.bucket_count.bucket_of_hash(hash_of_group(group));
            &self.bucket_candidates(group, bucket)[..candidate_count]
        });
        // min_by_key takes the first of equal candidates, like the BPF program.
        candidates.min_by_key(|candidate| cost(candidate)).copied()
    }

    fn draw_two_members(&self, hash: u32) -> (PlacementTableMember, PlacementTableMember) {
        let (first_index, second_index) = draw_two_numbers_below(mix_hash(hash), self.members.len() as u32);
        (self.members[first_index as usize], self.members[second_index as usize])
    }
}

/// Returns, for each bucket, the member with the highest hash of member and bucket (highest random weight, Thaler and
/// Ravishankar, 1998). If a member leaves, only the buckets of this member move.
pub fn rendezvous_table(members: &[ServerId], bucket_count: BucketCount) -> Vec<ServerId> {
    let members: Vec<_> = members.iter().map(|server| (*server, 1)).collect();
    weighted_rendezvous_table(&members, bucket_count)
}

/// Returns the result of [`rendezvous_table`] for members with weights of 1 or more. A member has as many hashes with
/// each bucket as its weight, and so a proportional number of the buckets.
pub fn weighted_rendezvous_table(members: &[(ServerId, u32)], bucket_count: BucketCount) -> Vec<ServerId> {
    let rendezvous_hash = |bucket: u32, server: ServerId, draw: u32| {
        let draw = if draw == 0 { 0 } else { mix_hash(draw) as u32 };
        mix_hash((bucket << 16 | u32::from(server.get())) ^ draw)
    };
    let highest_member_hash = |bucket: u32, (server, weight): (ServerId, u32)| {
        ((0..weight).map(|draw| rendezvous_hash(bucket, server, draw)).max(), server)
    };
    (0..bucket_count.get())
        .filter_map(|bucket| members.iter().map(|member| highest_member_hash(bucket, *member)).max())
        .map(|(_, server)| server)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn server_id(number: u64) -> ServerId {
        ServerId::try_from(number).unwrap()
    }

    fn build_four_tuple(port: u16) -> FourTuple {
        FourTuple::ipv4((Ipv4Addr::new(10, 1, 0, 7), port), (Ipv4Addr::new(10, 200, 0, 1), 80))
    }

    fn table_with_loads(rule: PlacementRule, loads: &[u32]) -> PlacementTable {
        let servers: Vec<ServerId> = (0..loads.len() as u64).map(|n| server_id(n + 1)).collect();
        let bucket_count = BucketCount::new(4).unwrap();
        let mut candidates_by_load: Vec<CandidateCore> = loads
            .iter()
            .enumerate()
            .map(|(n, load)| CandidateCore { server: servers[n], fixed_point_load: *load, core_slot: n as u16 })
            .collect();
        candidates_by_load.sort_by_key(|candidate| (candidate.fixed_point_load, candidate.server));
        PlacementTable {
            generation: 1,
            rule,
            bucket_count,
            rss_key_by_group: vec![RssKey::microsoft_verification_key()],
            candidates_per_bucket: loads.len() as u32,
            candidates: candidates_by_load.repeat(4),
            assignment_cost: 10,
            core_slots: servers.iter().map(|server| ServerCore { server: *server, core: 0 }).collect(),
            members: servers
                .iter()
                .zip(loads)
                .map(|(server, load)| PlacementTableMember { server: *server, fixed_point_load: *load })
                .collect(),
            consistent_server_by_bucket: rendezvous_table(&servers, bucket_count),
            previous_consistent_server_by_bucket: Vec::new(),
            down_servers: Vec::new(),
            load_age_by_core_slot: Vec::new(),
        }
    }

    #[test]
    fn table_rule_selects_the_first_candidate_of_the_bucket() {
        let table = table_with_loads(PlacementRule::Table, &[30, 10, 20]);
        let mut state = PlacementTableState::for_table(&table);
        for port in 0..50 {
            assert_eq!(table.select_server(&mut state, &build_four_tuple(port)), Some(server_id(2)));
        }
    }

    #[test]
    fn least_assigned_rule_adds_assigned_connections_to_the_load() {
        let table = table_with_loads(PlacementRule::LeastAssigned, &[0, 25, 1000]);
        let mut state = PlacementTableState::for_table(&table);
        let selected_ids: Vec<u16> =
            (0..5).map(|port| table.select_server(&mut state, &build_four_tuple(port)).unwrap().get()).collect();
        assert_eq!(selected_ids, [1, 1, 1, 2, 1]);
        assert_eq!(state.assigned_connections_by_core_slot, [4, 1, 0]);
    }

    #[test]
    fn round_robin_is_cyclic_and_power_of_two_prefers_low_load() {
        let round_robin_table = table_with_loads(PlacementRule::RoundRobin, &[0, 0, 0]);
        let mut state = PlacementTableState::for_table(&round_robin_table);
        let selected_ids: Vec<u16> =
            (0..4).map(|_| round_robin_table.select_server(&mut state, &build_four_tuple(1)).unwrap().get()).collect();
        assert_eq!(selected_ids, [1, 2, 3, 1]);

        let power_of_two_table = table_with_loads(PlacementRule::PowerOfTwo, &[10, 0, 20, 30]);
        let mut selection_count_by_id = [0; 5];
        (0..4000).for_each(|port| {
            selection_count_by_id
                [usize::from(power_of_two_table.select_server(&mut state, &build_four_tuple(port)).unwrap().get())] += 1
        });
        assert!(
            (1600..1900).contains(&selection_count_by_id[2]) && (180..330).contains(&selection_count_by_id[4]),
            "{selection_count_by_id:?}"
        );
    }

    #[test]
    fn table_without_members_selects_no_server() {
        let mut table_without_members = table_with_loads(PlacementRule::Table, &[1]);
        table_without_members.members.clear();
        assert_eq!(
            table_without_members.select_server(&mut PlacementTableState::default(), &build_four_tuple(1)),
            None
        );
    }

    #[test]
    fn removal_of_a_server_moves_only_its_own_buckets() {
        let servers: Vec<ServerId> = (1..=5).map(server_id).collect();
        let bucket_count = BucketCount::new(1024).unwrap();
        let (full_table, reduced_table) =
            (rendezvous_table(&servers, bucket_count), rendezvous_table(&servers[1..], bucket_count));
        assert!(full_table.iter().zip(&reduced_table).all(|(old, new)| *old == servers[0] || old == new));
        assert!(servers.iter().all(|server| (150..260).contains(&full_table.iter().filter(|s| *s == server).count())));
    }

    #[test]
    fn rendezvous_bucket_counts_are_proportional_to_weights() {
        let bucket_count = BucketCount::new(2048).unwrap();
        let table = weighted_rendezvous_table(&[(server_id(1), 1), (server_id(2), 3)], bucket_count);
        let heavy_bucket_count = table.iter().filter(|server| **server == server_id(2)).count();
        assert!((1480..1592).contains(&heavy_bucket_count), "{heavy_bucket_count}");
        // The member with more weight takes buckets, and the other members exchange none.
        let table_with_increased_weight =
            weighted_rendezvous_table(&[(server_id(1), 1), (server_id(2), 4)], bucket_count);
        assert!(table.iter().zip(&table_with_increased_weight).all(|(old, new)| old == new || *new == server_id(2)));
    }

    #[test]
    fn bucket_count_must_be_a_power_of_two() {
        assert_eq!(
            BucketCount::new(100).unwrap_err().to_string(),
            "100 buckets: expected a power of two from 1 to 2048"
        );
        assert!(BucketCount::new(4096).is_err());
        assert!(BucketCount::new(1).is_ok());
    }
}
