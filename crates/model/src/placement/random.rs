//! Random placement tables, for tests of the code that reads placement tables.

use coreward_intf as intf;
use rand::Rng;

use super::{
    BucketCount, CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, ServerCore, rendezvous_table,
};
use crate::ServerId;
use crate::rss::{RssInputTransform, RssKey, uniform_below};

impl PlacementTable {
    /// Returns a placement table of `servers` (at least one) with random keys, RSS inputs, loads and costs. The loads
    /// have few different values, so that ties occur. `group_count` is from 1 to
    /// [`MAX_RSS_GROUPS`](intf::MAX_RSS_GROUPS).
    pub fn random(
        rule: PlacementRule,
        generation: u64,
        group_count: usize,
        servers: &[ServerId],
        rng: &mut impl Rng,
    ) -> Self {
        let bucket_count = BucketCount::new(1 << uniform_below(rng, 10)).expect("a power of two");
        let cores_per_server = 1 + uniform_below(rng, 8);
        let core_slots: Vec<ServerCore> = servers
            .iter()
            .flat_map(|server| (0..cores_per_server as u16).map(|core| ServerCore { server: *server, core }))
            .collect();
        let max_candidates_per_bucket = intf::MAX_TABLE_CANDIDATES / (group_count as u32 * bucket_count.get());
        let candidates_per_bucket = 1 + uniform_below(rng, intf::MAX_CANDIDATES.min(max_candidates_per_bucket));
        let candidate_count = group_count as u32 * bucket_count.get() * candidates_per_bucket;
        let candidates = (0..candidate_count).map(|_| random_candidate(&core_slots, rng)).collect();
        let members = random_members(servers, rng);
        let consistent_server_by_bucket = rendezvous_table(servers, bucket_count);
        let previous_consistent_server_by_bucket =
            consistent_server_by_bucket.iter().map(|server| random_previous_server(*server, servers, rng)).collect();
        Self {
            generation,
            rule,
            bucket_count,
            rss_key_by_group: (0..group_count).map(|_| random_rss_key(rng)).collect(),
            candidates_per_bucket,
            candidates,
            assignment_cost: uniform_below(rng, 4) * 700,
            core_slots,
            members,
            consistent_server_by_bucket,
            previous_consistent_server_by_bucket,
            down_servers: Vec::new(),
            load_age_by_core_slot: Vec::new(),
        }
    }
}

fn random_candidate(core_slots: &[ServerCore], rng: &mut impl Rng) -> CandidateCore {
    let core_slot = uniform_below(rng, core_slots.len() as u32) as u16;
    let server = core_slots[usize::from(core_slot)].server;
    CandidateCore { server, fixed_point_load: uniform_below(rng, 16) * 1000, core_slot }
}

/// Returns the servers as members with random loads. Some members occur twice, like servers of double weight.
fn random_members(servers: &[ServerId], rng: &mut impl Rng) -> Vec<PlacementTableMember> {
    let member_servers = servers.iter().chain(&servers[..uniform_below(rng, servers.len() as u32) as usize]);
    member_servers
        .map(|server| PlacementTableMember { server: *server, fixed_point_load: uniform_below(rng, 5) * 1000 })
        .collect()
}

/// Returns a random previous server for a bucket whose current server is `server`.
fn random_previous_server(server: ServerId, servers: &[ServerId], rng: &mut impl Rng) -> Option<ServerId> {
    match uniform_below(rng, 3) {
        0 => None,
        1 => Some(server),
        _ => Some(servers[uniform_below(rng, servers.len() as u32) as usize]),
    }
}

/// Returns a random RSS key. In half of the cases, the key's RSS input is transformed.
fn random_rss_key(rng: &mut impl Rng) -> RssKey {
    let input_transforms = [
        RssInputTransform::None,
        RssInputTransform::None,
        RssInputTransform::SymmetricXor,
        RssInputTransform::SymmetricOrXor,
    ];
    let input_transform = input_transforms[uniform_below(rng, input_transforms.len() as u32) as usize];
    RssKey::random(rng).with_input_transform(input_transform)
}
