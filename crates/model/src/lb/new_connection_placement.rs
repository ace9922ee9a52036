//! Placement of new connections by the placement table. In addition, servers that cannot take a connection are skipped,
//! and a retransmitted SYN goes to the server of the first SYN.

use coreward_intf as intf;

use super::{FlowEntry, ServiceState};
use crate::placement::{PlacementRule, PlacementTable, PlacementTableState, draw_two_numbers_below, mix_hash};
use crate::rss::ToeplitzTables;
use crate::{FourTuple, ServerId};

/// Maximum number of members of a table that are tried if the selected server cannot take a connection.
const MAX_FALLBACK_MEMBERS: usize = 16;

#[derive(Debug, Clone)]
pub(super) struct InstalledPlacementTable {
    placement_table: PlacementTable,
    toeplitz_tables_by_group: Vec<ToeplitzTables>,
    pub state: PlacementTableState,
}

impl InstalledPlacementTable {
    pub fn new(placement_table: PlacementTable) -> Self {
        let toeplitz_tables_by_group =
            placement_table.rss_key_by_group.iter().map(|key| key.toeplitz_tables()).collect();
        Self { state: PlacementTableState::for_table(&placement_table), toeplitz_tables_by_group, placement_table }
    }

    fn toeplitz_hash(&self, group: usize, tuple: &FourTuple) -> u32 {
        self.toeplitz_tables_by_group[group].hash_four_tuple(&tuple.bytes())
    }

    /// Returns whether the placement rule can select different servers for packets of the same connection.
    fn has_stateful_rule(&self) -> bool {
        matches!(self.placement_table.rule, PlacementRule::LeastAssigned | PlacementRule::RoundRobin)
    }

    /// Returns the server of the packet's bucket and the bucket's previous server, whatever their loads. Returns `None`
    /// for a table without members.
    pub fn flow_entry_of_bucket(&self, tuple: &FourTuple) -> Option<FlowEntry> {
        if self.placement_table.members.is_empty() {
            return None;
        }
        let bucket_index = self.placement_table.bucket_count.bucket_of_hash(self.toeplitz_hash(0, tuple)) as usize;
        let server = *self.placement_table.consistent_server_by_bucket.get(bucket_index)?;
        let previous_server =
            self.placement_table.previous_consistent_server_by_bucket.get(bucket_index).copied().flatten();
        Some(FlowEntry { previous_server, ..FlowEntry::for_server(server) })
    }
}

/// Direct-mapped cache, by connection hash, of servers that rules with state selected recently. Each entry is one word,
/// as in `bpf/include/intf.h`.
#[derive(Debug, Clone)]
pub(super) struct RecentPlacements(Vec<u64>);

impl Default for RecentPlacements {
    fn default() -> Self {
        Self(vec![0; intf::RECENT_PLACEMENTS as usize])
    }
}

impl RecentPlacements {
    pub fn cache_words(&self) -> &[u64] {
        &self.0
    }

    fn encode_entry_key(hash: u32, generation: u64, service_slot: usize) -> u64 {
        u64::from(hash) << intf::RECENT_HASH_SHIFT
            | u64::from(intf::RECENT_VALID_BIT)
            | (generation & u64::from(intf::RECENT_GENERATION_MASK)) << intf::RECENT_GENERATION_SHIFT
            | (service_slot as u64) << intf::RECENT_SERVICE_SHIFT
    }

    fn entry_mut(&mut self, hash: u32) -> &mut u64 {
        let index = hash as usize % self.0.len();
        &mut self.0[index]
    }

    fn find_server(&mut self, hash: u32, key: u64) -> Option<ServerId> {
        let entry = *self.entry_mut(hash);
        let id = entry & u64::from(intf::COOKIE_ID_MASK);
        (entry ^ id == key).then(|| ServerId::try_from(id).expect("14 bits"))
    }
}

impl ServiceState {
    /// Selects a server that can take a new connection. With `recent_placements`, a retransmitted SYN goes to the same
    /// server as the first one. Without them, a datagram is placed independently of earlier ones.
    pub(super) fn select_server(
        &mut self,
        service_slot: usize,
        recent_placements: Option<&mut RecentPlacements>,
        tuple: &FourTuple,
    ) -> Option<ServerId> {
        // The placement is taken out of the service while the service's servers are borrowed.
        let mut installed_table = self.installed_table.take()?;
        let selected_server =
            self.select_server_from_table(&mut installed_table, service_slot, recent_placements, tuple);
        self.installed_table = Some(installed_table);
        selected_server
    }

    fn select_server_from_table(
        &mut self,
        placement: &mut InstalledPlacementTable,
        service_slot: usize,
        recent_placements: Option<&mut RecentPlacements>,
        tuple: &FourTuple,
    ) -> Option<ServerId> {
        if placement.placement_table.members.is_empty() {
            return None;
        }
        let bytes = tuple.bytes();
        let hash = placement.toeplitz_hash(0, tuple);
        let key = RecentPlacements::encode_entry_key(hash, placement.placement_table.generation, service_slot);
        let mut recent_placements = recent_placements.filter(|_| placement.has_stateful_rule());
        if let Some(recent_placements) = &mut recent_placements
            && let Some(id) = recent_placements.find_server(hash, key)
            && self.is_eligible_with_known_mac(id)
        {
            return Some(id);
        }
        placement.state.round_robin_counter = self.round_robin_counter;
        let selected_server = placement.placement_table.select_server_and_count_connection(
            &mut placement.state,
            |group| placement.toeplitz_tables_by_group[group].hash_four_tuple(&bytes),
            |id| self.is_eligible_with_known_mac(id),
        );
        self.round_robin_counter = placement.state.round_robin_counter;
        let id = selected_server
            .filter(|id| self.is_eligible_with_known_mac(*id))
            .or_else(|| self.choose_fallback_server(&placement.placement_table, hash))?;
        if let Some(recent_placements) = recent_placements {
            *recent_placements.entry_mut(hash) = key | u64::from(id.get());
        }
        Some(id)
    }

    /// Returns the next member that can take a connection, starting from a member that the hash selects.
    fn choose_fallback_server(&self, table: &PlacementTable, hash: u32) -> Option<ServerId> {
        let (start, _) = draw_two_numbers_below(mix_hash(hash), table.members.len() as u32);
        let fallback_members =
            table.members.iter().cycle().skip(start as usize).take(MAX_FALLBACK_MEMBERS.min(table.members.len()));
        fallback_members.map(|member| member.server).find(|id| self.is_eligible_with_known_mac(*id))
    }
}
