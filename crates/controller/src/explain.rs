//! Explanation of a packet's destination, for `coreward explain`.

mod established;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use coreward_api::types::{ExplainedServer, Explanation};
use coreward_model::connection_table::OwnerNumber;
use coreward_model::cookie::FleetKeys;
use coreward_model::forwarding::{Forwarding, flow_port};
use coreward_model::placement::{
    Candidate, Member, PlacementRule, PlacementState, PlacementTable, mix_hash, two_draws,
};
use coreward_model::policy::{Pool, PoolServer, ServerLoads};
use coreward_model::tuple::{FourTuple, MixedFamilies, ServiceAddress};
use coreward_model::vlan::Vlan;
use coreward_model::{ServerId, load};

pub use established::ExplainedPacket;

use super::{Controller, Now};
use coreward_fleet::fleet::{FleetServer, FleetService};
use coreward_fleet::records::LoadBalancerRecord;

/// Reason for which the placement of a packet cannot be explained.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExplainError {
    #[error("no service at {address}: expected one of {known_services}")]
    UnknownService { address: ServiceAddress, known_services: String },
    #[error(transparent)]
    MixedFamilies(#[from] MixedFamilies),
}

/// Copy of a service's state: explanations with thousands of servers must not delay the processing of reports.
pub struct ServiceView {
    service: FleetService,
    table: Option<Arc<PlacementTable>>,
    pool: Pool,
    /// Names and VLANs of all servers, because a table may contain a server that has left the pool.
    names: HashMap<ServerId, (String, Vlan)>,
    cookie_keys: FleetKeys,
    /// Fraction of packets that load balancers place by the cookie, with LB-side stamping.
    cookie_share: Option<f64>,
    /// Names of load balancers by the owner number in the cookies of their connection tables.
    owner_names: Vec<(OwnerNumber, String)>,
}

/// Server in the view of a service.
#[derive(Debug, Clone)]
pub struct ViewedServer {
    id: ServerId,
    name: String,
    vlan: Vlan,
    /// Input of the policy about this server, if the server is in the service.
    pool_server: Option<PoolServer>,
}

impl Controller {
    /// Returns a view of the service without servers; callers add them one by one ([`Controller::viewed_server`]).
    /// Fails if no service has this address.
    pub fn service_view(&self, address: ServiceAddress, now: Now) -> Result<ServiceView, ExplainError> {
        let service = self.services.iter().find(|service| service.fleet().address == address);
        let service =
            service.ok_or_else(|| ExplainError::UnknownService { address, known_services: self.known_services() })?;
        let owner = |(name, known): (&String, &LoadBalancerRecord)| Some((known.owner?, name.clone()));
        Ok(ServiceView {
            service: service.fleet().clone(),
            table: service.newest_table().map(|newest| newest.table),
            pool: self.with_context(service, Pool::new(Vec::new(), 1), now),
            names: HashMap::new(),
            cookie_keys: self.fleet.key_ring.keys,
            cookie_share: self.load_balancers.stamped_packets(&service.fleet().name).cookie_share(),
            owner_names: self.fleet.load_balancers.iter().filter_map(owner).collect(),
        })
    }

    pub fn viewed_server(&self, view: &ServiceView, id: ServerId, server: &FleetServer, now: Now) -> ViewedServer {
        let service = self.positions.get(&view.service.index).map(|position| &self.services[*position]);
        let service = service.filter(|service| service.fleet().members.contains_key(&id));
        let pool_server = service.map(|service| self.pool_server(service, id, now));
        ViewedServer { id, name: server.name.clone(), vlan: server.vlan, pool_server }
    }

    /// Explains a packet, with all servers read at once.
    #[cfg(test)]
    pub fn explain(
        &self,
        address: ServiceAddress,
        client: SocketAddr,
        packet: ExplainedPacket,
        now: Now,
    ) -> Result<Explanation, ExplainError> {
        let view = self.service_view(address, now)?;
        let servers = self.servers_after(None).map(|(id, server)| self.viewed_server(&view, id, server, now));
        let servers: Vec<ViewedServer> = servers.collect();
        view.with_servers(servers).explain(client, packet)
    }

    fn known_services(&self) -> String {
        let known: Vec<String> = self.services.iter().map(|service| service.fleet().address.to_string()).collect();
        if known.is_empty() { "none (there are no services)".to_owned() } else { known.join(", ") }
    }
}

impl ServiceView {
    pub fn with_servers(mut self, servers: Vec<ViewedServer>) -> Self {
        let mut members = Vec::with_capacity(servers.len());
        for ViewedServer { id, name, vlan, pool_server } in servers {
            self.names.insert(id, (name, vlan));
            members.extend(pool_server);
        }
        self.pool = self.pool.replace_servers(members);
        self
    }

    /// Explains where a packet from `client` to the service goes. A first packet follows the newest table. For other
    /// packets the explanation contains all that the controller can know. Fails if client and VIP are of different
    /// address families.
    pub fn explain(&self, client: SocketAddr, packet: ExplainedPacket) -> Result<Explanation, ExplainError> {
        Ok(self.case(client)?.explanation(packet))
    }

    fn case(&self, client: SocketAddr) -> Result<ConnectionCase<'_>, ExplainError> {
        Ok(ConnectionCase { view: self, tuple: FourTuple::new(client, self.service.address.socket)? })
    }
}

struct ConnectionCase<'a> {
    view: &'a ServiceView,
    tuple: FourTuple,
}

/// Server to which the packet goes, if the controller can know it, and the reason in one sentence.
type PacketVerdict = (Option<ServerId>, String);

impl ConnectionCase<'_> {
    fn choose(&self, packet: ExplainedPacket) -> PacketVerdict {
        match (packet, self.view.table.as_deref()) {
            (ExplainedPacket::Established { tsecr, is_reset }, table) => {
                self.established_verdict(table, tsecr, is_reset)
            }
            (ExplainedPacket::NewConnection, Some(table)) => self.verdict(table),
            (ExplainedPacket::NewConnection, None) => (None, "no table has been made yet".to_owned()),
        }
    }

    fn explanation(&self, packet: ExplainedPacket) -> Explanation {
        let (chosen, reason) = self.choose(packet);
        let table = self.view.table.as_deref();
        Explanation {
            service: self.view.service.name.clone(),
            policy: self.view.service.policy.to_owned(),
            table_generation: table.map_or(0, |table| table.generation),
            servers: self.view.pool.servers().iter().map(|server| self.server(server)).collect(),
            chosen_server: chosen.map(|id| self.name(id).to_owned()),
            reason,
            forwarding: self.view.service.mode.forwarding.name().to_owned(),
            outer_source_port: self.outer_source_port(),
            cookie_share: self.view.cookie_share,
        }
    }

    /// Returns the outer source port that load balancers derive from the connection when they encapsulate packets.
    fn outer_source_port(&self) -> Option<u16> {
        let client = self.tuple.client();
        let [source, destination] = [client.port(), self.tuple.vip().port()].map(u16::to_be_bytes);
        let ports = [source[0], source[1], destination[0], destination[1]];
        (self.view.service.mode.forwarding == Forwarding::Gue).then(|| flow_port(client.ip(), ports))
    }

    fn name(&self, id: ServerId) -> &str {
        self.view.names.get(&id).map_or("(a server that left)", |(name, _)| name)
    }

    /// Returns the RSS hash, the bucket, the core and the core's load that the connection would have at this server.
    fn server(&self, server: &PoolServer) -> ExplainedServer {
        let hash = server.rss.as_ref().map(|rss| rss.key.toeplitz(&self.tuple.bytes()));
        let core = server.rss.as_ref().zip(hash).map(|(rss, hash)| rss.indirection_table.queue(hash));
        let cores = server.loads.as_ref().and_then(ServerLoads::cores);
        let load_of = |core: u16| cores.and_then(|loads| loads.get(usize::from(core))).copied();
        ExplainedServer {
            name: self.name(server.id).to_owned(),
            id: server.id.get().into(),
            vlan: self.view.names.get(&server.id).and_then(|(_, vlan)| vlan.id()),
            hash,
            bucket: hash.map(|hash| self.view.service.buckets.bucket(hash)),
            core: core.map(u32::from),
            core_load: core.and_then(load_of),
            eligible: server.eligible,
        }
    }

    fn verdict(&self, table: &PlacementTable) -> PacketVerdict {
        if table.members.is_empty() {
            let count = self.view.pool.servers().len();
            return (None, format!("none of the {count} servers takes new connections: the new connection is dropped"));
        }
        match table.rule {
            PlacementRule::Table => self.verdict_by_table(table),
            PlacementRule::LeastAssigned => self.verdict_by_assignments(table),
            PlacementRule::RoundRobin => self.verdict_by_round_robin(table),
            PlacementRule::PowerOfTwo => self.verdict_by_two_draws(table),
        }
    }

    fn verdict_by_table(&self, table: &PlacementTable) -> PacketVerdict {
        let Some(chosen) = table.choose(&mut PlacementState::for_table(table), &self.tuple) else {
            return (None, "the table names no server for this bucket".to_owned());
        };
        let bucket = self.describe_bucket(table, chosen);
        let name = self.name(chosen);
        let candidate = self.candidates(table).into_iter().find(|candidate| candidate.server == chosen);
        let reason = match candidate {
            Some(candidate) if !is_load_independent(table) => {
                format!(
                    "{bucket} goes to {name}: {} is the least loaded that it reaches",
                    self.describe_core(table, candidate)
                )
            }
            _ if self.view.pool.has_loads() => {
                format!("{bucket} goes to {name} by the bucket alone, independent of loads")
            }
            _ => format!("{bucket} goes to {name} by the bucket alone: no loads are known"),
        };
        (Some(chosen), reason)
    }

    fn verdict_by_assignments(&self, table: &PlacementTable) -> PacketVerdict {
        let mut candidates = self.candidates(table);
        // A stable sort, so that the first of equal loads wins, as in the data plane.
        candidates.sort_by_key(|candidate| candidate.load);
        candidates.dedup_by_key(|candidate| candidate.core_slot);
        let Some(first) = candidates.first().copied() else {
            return (None, "the table names no server for this bucket".to_owned());
        };
        let mut reason = format!(
            "{} goes to {}: {} is the least loaded of {} candidates",
            self.describe_bucket(table, first.server),
            self.name(first.server),
            self.describe_core(table, first),
            candidates.len()
        );
        if let Some(second) = candidates.get(1) {
            let next = format!("{} ({})", self.name(second.server), self.describe_core(table, *second));
            reason += &match (second.load - first.load).checked_div(table.assignment_cost) {
                // Strictly more than the distance: the first of equal candidates wins.
                Some(more) => format!(
                    ", unless a load balancer has given it more than {more} connections since the last table, each \
                     counted as {:.4}; then {next}",
                    load_fraction(table.assignment_cost)
                ),
                None => format!(", followed by {next}"),
            };
        }
        (Some(first.server), reason)
    }

    fn verdict_by_round_robin(&self, table: &PlacementTable) -> PacketVerdict {
        let mut turns: Vec<(ServerId, u32)> = Vec::new();
        for member in &table.members {
            match turns.iter_mut().find(|(server, _)| *server == member.server) {
                Some((_, count)) => *count += 1,
                None => turns.push((member.server, 1)),
            }
        }
        let weighted = turns.len() < table.members.len();
        let words = |(server, count): &(ServerId, u32)| match weighted {
            true => format!("{} {count}", self.name(*server)),
            false => self.name(*server).to_owned(),
        };
        let list = turns.iter().map(words).collect::<Vec<_>>().join(", ");
        let order = match weighted {
            true => format!("have these shares of {} turns, evenly spread", table.members.len()),
            false => "have their turns in this order".to_owned(),
        };
        let servers = turns.len();
        let reason =
            format!("the {servers} servers that take new connections ({list}) {order}, counted by the load balancer");
        (None, reason)
    }

    fn verdict_by_two_draws(&self, table: &PlacementTable) -> PacketVerdict {
        let hash = table.groups.first().map_or(0, |key| key.toeplitz(&self.tuple.bytes()));
        let (first, second) = two_draws(mix_hash(hash), table.members.len() as u32);
        let drawn = [first, second].map(|position| table.members[position as usize]);
        let chosen = table.choose(&mut PlacementState::for_table(table), &self.tuple);
        let what = if self.view.service.policy == "pow2" { "mean load" } else { "compared" };
        let words = |member: Member| format!("{} ({what} {:.3})", self.name(member.server), load_fraction(member.load));
        let reason = match (chosen, first == second) {
            (None, _) => "the table names no server".to_owned(),
            (Some(_), true) => format!("both draws by the connection's hash are {}", words(drawn[0])),
            (Some(chosen), false) => format!(
                "of two servers drawn by the connection's hash, {} and {}, {} is the less loaded",
                words(drawn[0]),
                words(drawn[1]),
                self.name(chosen)
            ),
        };
        (chosen, reason)
    }

    /// Returns the candidates for the connection: those of its bucket in every RSS group.
    fn candidates(&self, table: &PlacementTable) -> Vec<Candidate> {
        let bytes = self.tuple.bytes();
        let per_group = table.groups.iter().enumerate().flat_map(|(group, key)| {
            let bucket = table.bucket_count.bucket(key.toeplitz(&bytes));
            table.candidates_of(group, bucket).to_vec()
        });
        per_group.collect()
    }

    /// Returns a text like "bucket 17 of 128". The bucket is found by the key of the chosen server's RSS group.
    fn describe_bucket(&self, table: &PlacementTable, chosen: ServerId) -> String {
        let own_key = self.rss_key(chosen).filter(|key| table.groups.contains(key));
        let (key, whose) = match own_key {
            Some(key) => (key, ""),
            None => (&table.groups[0], " by a hash that only load balancers use"),
        };
        let bucket = table.bucket_count.bucket(key.toeplitz(&self.tuple.bytes()));
        format!("bucket {bucket} of {}{whose}", table.bucket_count.get())
    }

    fn rss_key(&self, id: ServerId) -> Option<&coreward_model::rss::RssKey> {
        let server = self.view.pool.servers().iter().find(|server| server.id == id)?;
        server.rss.as_ref().map(|rss| &rss.key)
    }

    /// Returns whether the candidate stands for one core, and not for a whole server.
    fn names_core(&self, table: &PlacementTable, candidate: Candidate) -> bool {
        self.rss_key(candidate.server).is_some_and(|key| table.groups.contains(key))
    }

    fn describe_core(&self, table: &PlacementTable, candidate: Candidate) -> String {
        let load = load_fraction(candidate.load);
        if !self.names_core(table, candidate) {
            let why = if self.rss_key(candidate.server).is_none() { ", whose RSS is unknown," } else { "" };
            return format!("the whole server{why} with load {load:.3} in the table");
        }
        format!("core {} with load {load:.3} in the table", table.core_slots[usize::from(candidate.core_slot)].core)
    }
}

/// Returns whether the table gives each bucket to one server regardless of the loads: with `hash`, `consistent-hash`
/// and `maglev`, and with `crossrss` before the first report.
fn is_load_independent(table: &PlacementTable) -> bool {
    table.core_slots.len() == table.members.len() && table.candidates.iter().all(|candidate| candidate.load == 0)
}

/// Converts a load in the fixed-point format of the data plane to a fraction of a core's capacity.
fn load_fraction(fixed_point: u32) -> f64 {
    f64::from(fixed_point) / f64::from(load::to_fixed_point(1.0))
}
