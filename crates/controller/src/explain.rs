//! Explanation of a packet's destination, for `coreward explain`.

mod established;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use coreward_api::types::{ExplainedServer, Explanation};
use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::cookie::FleetCookieKeys;
use coreward_model::forwarding::{ForwardingMode, gue_source_port};
use coreward_model::placement::{
    CandidateCore, PlacementRule, PlacementTable, PlacementTableMember, PlacementTableState, draw_two_numbers_below,
    mix_hash,
};
use coreward_model::policy::{PoolServer, ServerLoads, ServerPool};
use coreward_model::tuple::{FourTuple, MixedAddressFamilies, ServiceAddress};
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, load};

pub use established::ExplainedPacket;

use super::{ClockReadings, Controller};
use coreward_fleet::fleet::{FleetServer, FleetService};
use coreward_fleet::records::LoadBalancerRecord;

/// Reason why the placement of a packet cannot be explained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PacketExplanationError {
    #[error("no service at {address}: expected one of {known_services}")]
    UnknownService { address: ServiceAddress, known_services: String },
    #[error(transparent)]
    MixedAddressFamilies(#[from] MixedAddressFamilies),
}

/// Copy of a service's state. Placements are explained from the copy, because thousands of servers would delay reports.
pub struct ServiceSnapshot {
    service: FleetService,
    table: Option<Arc<PlacementTable>>,
    pool: ServerPool,
    /// Names and VLANs of all servers, because a table may contain a server that has left the pool.
    server_names_and_vlans: HashMap<ServerId, (String, Vlan)>,
    cookie_keys: FleetCookieKeys,
    /// Fraction of packets that load balancers place by a cookie, or `None` if load balancers do not stamp the
    /// service's cookies.
    cookie_packet_fraction: Option<f64>,
    /// Names of load balancers, with the owner number by which a cookie identifies a load balancer's connection table.
    table_owner_names: Vec<(TableOwnerNumber, String)>,
}

/// Server as copied into a [`ServiceSnapshot`].
#[derive(Debug, Clone)]
pub struct SnapshotServer {
    id: ServerId,
    server_name: String,
    vlan: Vlan,
    /// Inputs of the policy for this server, or `None` if the server is not in the service.
    pool_server: Option<PoolServer>,
}

impl Controller {
    /// Returns a view of the service without servers. Callers obtain each server from [`Controller::snapshot_server`].
    /// Fails if no service has this address.
    pub fn service_snapshot(
        &self,
        address: ServiceAddress,
        now: ClockReadings,
    ) -> Result<ServiceSnapshot, PacketExplanationError> {
        let service = self.services.iter().find(|service| service.configuration().address == address);
        let service = service.ok_or_else(|| PacketExplanationError::UnknownService {
            address,
            known_services: self.describe_known_service_addresses(),
        })?;
        let owner_and_name =
            |(name, record): (&String, &LoadBalancerRecord)| Some((record.owner_number?, name.clone()));
        Ok(ServiceSnapshot {
            service: service.configuration().clone(),
            table: service.newest_table().map(|new_table| new_table.table),
            pool: self.with_service_wide_inputs(service, ServerPool::new(Vec::new(), 1), now),
            server_names_and_vlans: HashMap::new(),
            cookie_keys: self.fleet.key_ring.keys,
            cookie_packet_fraction: self
                .load_balancers
                .stamped_packet_counts(&service.configuration().name)
                .cookie_share(),
            table_owner_names: self.fleet.load_balancer_records.iter().filter_map(owner_and_name).collect(),
        })
    }

    pub fn snapshot_server(
        &self,
        view: &ServiceSnapshot,
        id: ServerId,
        server: &FleetServer,
        now: ClockReadings,
    ) -> SnapshotServer {
        let service =
            self.service_positions_by_index.get(&view.service.index).map(|position| &self.services[*position]);
        let service = service.filter(|service| service.configuration().members.contains_key(&id));
        let pool_server = service.map(|service| self.pool_server(service, id, now));
        SnapshotServer { id, server_name: server.name.clone(), vlan: server.vlan, pool_server }
    }

    #[cfg(test)]
    pub fn explain_packet(
        &self,
        address: ServiceAddress,
        client: SocketAddr,
        packet: ExplainedPacket,
        now: ClockReadings,
    ) -> Result<Explanation, PacketExplanationError> {
        let service_view = self.service_snapshot(address, now)?;
        let servers =
            self.servers_after_id(None).map(|(id, server)| self.snapshot_server(&service_view, id, server, now));
        let servers: Vec<SnapshotServer> = servers.collect();
        service_view.with_snapshot_servers(servers).explain_packet(client, packet)
    }

    fn describe_known_service_addresses(&self) -> String {
        let known_addresses: Vec<String> =
            self.services.iter().map(|service| service.configuration().address.to_string()).collect();
        if known_addresses.is_empty() { "none (there are no services)".to_owned() } else { known_addresses.join(", ") }
    }
}

impl ServiceSnapshot {
    pub fn with_snapshot_servers(mut self, servers: Vec<SnapshotServer>) -> Self {
        let mut pool_servers = Vec::with_capacity(servers.len());
        for SnapshotServer { id, server_name: name, vlan, pool_server } in servers {
            self.server_names_and_vlans.insert(id, (name, vlan));
            pool_servers.extend(pool_server);
        }
        self.pool = self.pool.with_servers(pool_servers);
        self
    }

    /// Explains to which server a packet from `client` to the service is sent. A first packet is placed by the newest
    /// table. For other packets, the explanation contains all that the controller can derive. Fails if client and VIP
    /// are of different address families.
    pub fn explain_packet(
        &self,
        client: SocketAddr,
        packet: ExplainedPacket,
    ) -> Result<Explanation, PacketExplanationError> {
        Ok(self.connection_explainer(client)?.explain_packet(packet))
    }

    fn connection_explainer(&self, client: SocketAddr) -> Result<ConnectionExplainer<'_>, PacketExplanationError> {
        Ok(ConnectionExplainer {
            service_snapshot: self,
            four_tuple: FourTuple::new(client, self.service.address.vip_and_port)?,
        })
    }
}

struct ConnectionExplainer<'a> {
    service_snapshot: &'a ServiceSnapshot,
    four_tuple: FourTuple,
}

/// Server to which the packet is sent, or `None` if the controller cannot determine it, and the reason in one sentence.
type ExplainedDestination = (Option<ServerId>, String);

impl ConnectionExplainer<'_> {
    fn packet_verdict(&self, packet: ExplainedPacket) -> ExplainedDestination {
        match (packet, self.service_snapshot.table.as_deref()) {
            (ExplainedPacket::Established { tsecr, is_reset }, table) => {
                self.verdict_on_established_connection(table, tsecr, is_reset)
            }
            (ExplainedPacket::NewConnection, Some(table)) => self.verdict_on_new_connection(table),
            (ExplainedPacket::NewConnection, None) => (None, "no table has been made yet".to_owned()),
        }
    }

    fn explain_packet(&self, packet: ExplainedPacket) -> Explanation {
        let (chosen_id, reason) = self.packet_verdict(packet);
        let table = self.service_snapshot.table.as_deref();
        Explanation {
            service: self.service_snapshot.service.name.clone(),
            policy: self.service_snapshot.service.policy_name.to_owned(),
            table_generation: table.map_or(0, |table| table.generation),
            servers: self.service_snapshot.pool.servers().iter().map(|server| self.explained_server(server)).collect(),
            chosen_server: chosen_id.map(|id| self.server_name(id).to_owned()),
            reason,
            forwarding: self.service_snapshot.service.settings.forwarding.name().to_owned(),
            outer_source_port: self.outer_source_port(),
            cookie_share: self.service_snapshot.cookie_packet_fraction,
        }
    }

    /// Returns the outer source port that load balancers derive from the connection when they encapsulate packets.
    fn outer_source_port(&self) -> Option<u16> {
        let client = self.four_tuple.client();
        let [source, destination] = [client.port(), self.four_tuple.vip().port()].map(u16::to_be_bytes);
        let port_bytes = [source[0], source[1], destination[0], destination[1]];
        (self.service_snapshot.service.settings.forwarding == ForwardingMode::Gue)
            .then(|| gue_source_port(client.ip(), port_bytes))
    }

    fn server_name(&self, id: ServerId) -> &str {
        self.service_snapshot.server_names_and_vlans.get(&id).map_or("(a server that left)", |(name, _)| name)
    }

    /// Returns the RSS hash, the bucket, the core and the core's load that the connection would have at this server.
    fn explained_server(&self, server: &PoolServer) -> ExplainedServer {
        let rss_hash = server.rss.as_ref().map(|rss| rss.key.toeplitz_hash(&self.four_tuple.bytes()));
        let core = server.rss.as_ref().zip(rss_hash).map(|(rss, hash)| rss.indirection_table.queue_for_hash(hash));
        let core_loads = server.loads.as_ref().and_then(ServerLoads::core_loads);
        let load_of_core = |core: u16| core_loads.and_then(|loads| loads.get(usize::from(core))).copied();
        ExplainedServer {
            name: self.server_name(server.id).to_owned(),
            id: server.id.get().into(),
            vlan: self.service_snapshot.server_names_and_vlans.get(&server.id).and_then(|(_, vlan)| vlan.id()),
            hash: rss_hash,
            bucket: rss_hash.map(|hash| self.service_snapshot.service.bucket_count.bucket_of_hash(hash)),
            core: core.map(u32::from),
            core_load: core.and_then(load_of_core),
            eligible: server.is_eligible,
        }
    }

    fn verdict_on_new_connection(&self, table: &PlacementTable) -> ExplainedDestination {
        if table.members.is_empty() {
            let server_count = self.service_snapshot.pool.servers().len();
            return (
                None,
                format!("none of the {server_count} servers takes new connections: the new connection is dropped"),
            );
        }
        match table.rule {
            PlacementRule::Table => self.verdict_by_table(table),
            PlacementRule::LeastAssigned => self.verdict_by_assignments(table),
            PlacementRule::RoundRobin => self.verdict_by_round_robin(table),
            PlacementRule::PowerOfTwo => self.verdict_by_two_random_choices(table),
        }
    }

    fn verdict_by_table(&self, table: &PlacementTable) -> ExplainedDestination {
        let Some(chosen_id) = table.select_server(&mut PlacementTableState::for_table(table), &self.four_tuple) else {
            return (None, "the table names no server for this bucket".to_owned());
        };
        let bucket_description = self.describe_bucket(table, chosen_id);
        let server_name = self.server_name(chosen_id);
        let chosen_candidate =
            self.connection_candidates(table).into_iter().find(|candidate| candidate.server == chosen_id);
        let reason = match chosen_candidate {
            Some(candidate) if !is_load_independent(table) => {
                format!(
                    "{bucket_description} goes to {server_name}: {} is the least loaded that it reaches",
                    self.describe_core(table, candidate)
                )
            }
            _ if self.service_snapshot.pool.has_loads() => {
                format!("{bucket_description} goes to {server_name} by the bucket alone, independent of loads")
            }
            _ => format!("{bucket_description} goes to {server_name} by the bucket alone: no loads are known"),
        };
        (Some(chosen_id), reason)
    }

    fn verdict_by_assignments(&self, table: &PlacementTable) -> ExplainedDestination {
        let mut candidates = self.connection_candidates(table);
        // The sort is stable, so that the first of equal loads wins, as in the data plane.
        candidates.sort_by_key(|candidate| candidate.fixed_point_load);
        candidates.dedup_by_key(|candidate| candidate.core_slot);
        let Some(first) = candidates.first().copied() else {
            return (None, "the table names no server for this bucket".to_owned());
        };
        let mut reason = format!(
            "{} goes to {}: {} is the least loaded of {} candidates",
            self.describe_bucket(table, first.server),
            self.server_name(first.server),
            self.describe_core(table, first),
            candidates.len()
        );
        if let Some(second) = candidates.get(1) {
            let next_description =
                format!("{} ({})", self.server_name(second.server), self.describe_core(table, *second));
            reason += &match (second.fixed_point_load - first.fixed_point_load).checked_div(table.assignment_cost) {
                // More connections than this distance are needed, because the first of equal candidates wins.
                Some(connections_until_next) => format!(
                    ", unless a load balancer has given it more than {connections_until_next} connections since the \
                     last table, each counted as {:.4}; then {next_description}",
                    to_load_fraction(table.assignment_cost)
                ),
                None => format!(", followed by {next_description}"),
            };
        }
        (Some(first.server), reason)
    }

    fn verdict_by_round_robin(&self, table: &PlacementTable) -> ExplainedDestination {
        let mut turn_counts: Vec<(ServerId, u32)> = Vec::new();
        for member in &table.members {
            match turn_counts.iter_mut().find(|(server, _)| *server == member.server) {
                Some((_, count)) => *count += 1,
                None => turn_counts.push((member.server, 1)),
            }
        }
        let is_weighted = turn_counts.len() < table.members.len();
        let describe_turns = |(server, count): &(ServerId, u32)| match is_weighted {
            true => format!("{} {count}", self.server_name(*server)),
            false => self.server_name(*server).to_owned(),
        };
        let turn_list = turn_counts.iter().map(describe_turns).collect::<Vec<_>>().join(", ");
        let order_description = match is_weighted {
            true => format!("have these shares of {} turns, evenly spread", table.members.len()),
            false => "have their turns in this order".to_owned(),
        };
        let server_count = turn_counts.len();
        let reason = format!(
            "the {server_count} servers that take new connections ({turn_list}) {order_description}, counted by the \
             load balancer"
        );
        (None, reason)
    }

    fn verdict_by_two_random_choices(&self, table: &PlacementTable) -> ExplainedDestination {
        let hash = table.rss_key_by_group.first().map_or(0, |key| key.toeplitz_hash(&self.four_tuple.bytes()));
        let (first_position, second_position) = draw_two_numbers_below(mix_hash(hash), table.members.len() as u32);
        let drawn_members = [first_position, second_position].map(|position| table.members[position as usize]);
        let chosen_server = table.select_server(&mut PlacementTableState::for_table(table), &self.four_tuple);
        let load_description =
            if self.service_snapshot.service.policy_name == "pow2" { "mean load" } else { "compared" };
        let describe_member = |member: PlacementTableMember| {
            format!(
                "{} ({load_description} {:.3})",
                self.server_name(member.server),
                to_load_fraction(member.fixed_point_load)
            )
        };
        let reason = match (chosen_server, first_position == second_position) {
            (None, _) => "the table names no server".to_owned(),
            (Some(_), true) => format!("both draws by the connection's hash are {}", describe_member(drawn_members[0])),
            (Some(chosen), false) => format!(
                "of two servers drawn by the connection's hash, {} and {}, {} is the less loaded",
                describe_member(drawn_members[0]),
                describe_member(drawn_members[1]),
                self.server_name(chosen)
            ),
        };
        (chosen_server, reason)
    }

    /// Returns the candidates for the connection, which are those of its bucket in every RSS group.
    fn connection_candidates(&self, table: &PlacementTable) -> Vec<CandidateCore> {
        let tuple_bytes = self.four_tuple.bytes();
        let candidates_per_group = table.rss_key_by_group.iter().enumerate().flat_map(|(group, key)| {
            let bucket = table.bucket_count.bucket_of_hash(key.toeplitz_hash(&tuple_bytes));
            table.bucket_candidates(group, bucket).to_vec()
        });
        candidates_per_group.collect()
    }

    /// Returns a text like "bucket 17 of 128". The bucket depends on the key of the chosen server's RSS group.
    fn describe_bucket(&self, table: &PlacementTable, chosen_id: ServerId) -> String {
        let group_key = self.rss_key_of_server(chosen_id).filter(|key| table.rss_key_by_group.contains(key));
        let (key, hash_suffix) = match group_key {
            Some(key) => (key, ""),
            None => (&table.rss_key_by_group[0], " by a hash that only load balancers use"),
        };
        let bucket = table.bucket_count.bucket_of_hash(key.toeplitz_hash(&self.four_tuple.bytes()));
        format!("bucket {bucket} of {}{hash_suffix}", table.bucket_count.get())
    }

    fn rss_key_of_server(&self, id: ServerId) -> Option<&coreward_model::rss::RssKey> {
        let server = self.service_snapshot.pool.servers().iter().find(|server| server.id == id)?;
        server.rss.as_ref().map(|rss| &rss.key)
    }

    /// Returns whether the candidate is a single core and not a whole server.
    fn is_single_core(&self, table: &PlacementTable, candidate: CandidateCore) -> bool {
        self.rss_key_of_server(candidate.server).is_some_and(|key| table.rss_key_by_group.contains(key))
    }

    fn describe_core(&self, table: &PlacementTable, candidate: CandidateCore) -> String {
        let load = to_load_fraction(candidate.fixed_point_load);
        if !self.is_single_core(table, candidate) {
            let unknown_rss_note =
                if self.rss_key_of_server(candidate.server).is_none() { ", whose RSS is unknown," } else { "" };
            return format!("the whole server{unknown_rss_note} with load {load:.3} in the table");
        }
        format!("core {} with load {load:.3} in the table", table.core_slots[usize::from(candidate.core_slot)].core)
    }
}

/// Returns whether the table gives each bucket to one server regardless of the loads. This is the case with `hash`,
/// `consistent-hash` and `maglev`, and with `crossrss` before the first report.
fn is_load_independent(table: &PlacementTable) -> bool {
    table.core_slots.len() == table.members.len()
        && table.candidates.iter().all(|candidate| candidate.fixed_point_load == 0)
}

/// Converts a load in the fixed-point format of the data plane to a fraction of a core's capacity.
fn to_load_fraction(fixed_point_load: u32) -> f64 {
    f64::from(fixed_point_load) / f64::from(load::load_to_fixed_point(1.0))
}
