//! Checks across values of the fleet's document. An invalid value is reported once, without errors that follow from it.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use coreward_config::{BoundedDuration, Reader, Span, Spanned, format_time};
use coreward_intf as intf;
use coreward_model::ServerId;
use coreward_model::consistency::Timestamps;
use coreward_model::lb_stamping;
use coreward_model::placement::BucketCount;
use coreward_wire::ServiceIndex;

use super::file::{FleetFile, Server};
use super::service::{self, Service};
use super::unique::UniqueValues;
use super::{DEFAULT_REPORT_INTERVAL, FleetConfig, ServerConfig, ServiceConfig, health, racks, transfer};

/// Checks the document and converts it. Mistakes are stored in the reader; after a mistake the result is incomplete.
pub fn check(file: FleetFile, reader: &mut Reader<'_>) -> FleetConfig {
    let max_connection_lifetime = file.max_connection_lifetime.0;
    let key_rotation = file.key_rotation.map(|interval| check_key_rotation(&interval, max_connection_lifetime, reader));
    let racks = racks::check(file.racks.as_deref(), None, reader);
    let load_balancers = racks::unique_names("load balancer", file.load_balancers.as_deref(), reader);
    let servers = check_server_entries(&file.servers, racks.as_ref(), reader);
    let names = file.servers.iter().filter_map(|server| Some(server.get_ref().name.value.as_ref()?.0.as_str()));
    let services = ServiceChecker { names: names.collect(), servers: &servers, buckets: file.buckets };
    let services = services.check(&file.services, reader);
    check_services_per_server(&servers, &services, reader);
    FleetConfig {
        report_interval: file.report_interval.map_or(DEFAULT_REPORT_INTERVAL, |BoundedDuration(interval)| interval),
        table_updates: file.table_updates,
        table_lifetime: file.table_lifetime.0,
        alpha: file.load_ewma_alpha,
        max_connection_lifetime,
        key_rotation,
        racks,
        load_balancers,
        servers,
        services,
        source: reader.source().clone(),
    }
}

fn check_services_per_server(servers: &[ServerConfig], services: &[ServiceConfig], reader: &mut Reader<'_>) {
    let mut counts = vec![0u32; servers.len()];
    for server in services.iter().flat_map(|service| &service.servers) {
        counts[*server] += 1;
    }
    let most = intf::MAX_SERVICES_OF_SERVER;
    for (server, count) in servers.iter().zip(counts).filter(|(_, count)| *count > most) {
        let message = format!("server {:?} is in {count} services: expected at most {most}", server.name);
        reader.report(server.span.clone(), message);
    }
}

/// Checks the interval of rotations. A second rotation overwrites the previous key, so its cookies must have expired.
fn check_key_rotation<const MIN: u64, const MAX: u64>(
    interval: &Spanned<BoundedDuration<MIN, MAX>>,
    max_connection_lifetime: Duration,
    reader: &mut Reader<'_>,
) -> Duration {
    let BoundedDuration(rotation_interval) = *interval.get_ref();
    if rotation_interval < max_connection_lifetime {
        let [rotation_interval, max_connection_lifetime] =
            [rotation_interval, max_connection_lifetime].map(format_time);
        let message = format!(
            "a key rotation every {rotation_interval}, but a cookie may live {max_connection_lifetime} \
             (`max_connection_lifetime`): expected no less than that"
        );
        reader.report(interval.span(), message);
    }
    rotation_interval
}

fn check_server_entries(
    listed: &[Spanned<Server>],
    known_racks: Option<&BTreeSet<String>>,
    reader: &mut Reader<'_>,
) -> Vec<ServerConfig> {
    if let Some(first_too_many) = listed.get(ServerId::COUNT) {
        let message =
            format!("{} servers: expected at most {}, all that a cookie holds", listed.len(), ServerId::COUNT);
        reader.report(first_too_many.span(), message);
    }
    let listed = &listed[..listed.len().min(ServerId::COUNT)];
    let mut names = UniqueValues::new("server name");
    let mut addresses = UniqueValues::new("server address");
    let mut ids = UniqueValues::new("server id");
    let mut servers = Vec::with_capacity(listed.len());
    for entry in listed {
        let server = entry.get_ref();
        let name = server.name.value.as_ref().map(|name| &name.0);
        let address = server.address.value.map(|address| address.0);
        let id = server.id.as_ref().map(|id| (*id.get_ref(), id.span()));
        names.insert(name, &server.name.span, reader);
        addresses.insert(address, &server.address.span, reader);
        if let Some((id, span)) = &id {
            ids.insert(Some(*id), span, reader);
        }
        let racks = racks::check(server.racks.as_deref(), known_racks, reader);
        let (Some(name), Some(address)) = (name, address) else { continue };
        servers.push(ServerConfig {
            name: name.clone(),
            address,
            id,
            state: server.state,
            weight: server.weight,
            capacity: server.capacity,
            vlan: server.vlan.unwrap_or_default(),
            racks,
            span: entry.span(),
        });
    }
    servers
}

struct ServiceChecker<'a> {
    /// Names of all servers, including those with mistakes.
    names: BTreeSet<&'a str>,
    servers: &'a [ServerConfig],
    buckets: BucketCount,
}

impl ServiceChecker<'_> {
    fn check(&self, listed: &[Spanned<Service>], reader: &mut Reader<'_>) -> Vec<ServiceConfig> {
        if let Some(first_too_many) = listed.get(ServiceIndex::COUNT) {
            let message = format!("{} services: expected at most {}", listed.len(), ServiceIndex::COUNT);
            reader.report(first_too_many.span(), message);
        }
        // The services beyond the limit are skipped: each may list all servers.
        let listed = &listed[..listed.len().min(ServiceIndex::COUNT)];
        let positions: HashMap<&str, usize> =
            self.servers.iter().enumerate().map(|(position, server)| (server.name.as_str(), position)).collect();
        let mut names = UniqueValues::new("service name");
        let mut vips = UniqueValues::new("VIP");
        let mut services = Vec::with_capacity(listed.len());
        for entry in listed {
            let service = entry.get_ref();
            let name = service.name.value.as_ref().map(|name| &name.0);
            names.insert(name, &service.name.span, reader);
            let pool = self.pool(service, &positions, reader);
            let Some(protocol) = service.protocol.value else { continue };
            let mode = service::mode(service, protocol, reader);
            let address = service.vip.value.map(|vip| vip.with_protocol(protocol));
            vips.insert(address, &service.vip.span, reader);
            if let Some(address) = address {
                self.reject_server_address(address.socket.ip(), &service.vip.span, reader);
            }
            let differs = |position: &usize| {
                address.is_some_and(|vip| vip.socket.is_ipv4() != self.servers[*position].address.is_ipv4())
            };
            let mixes_families = pool.iter().any(differs);
            let check = |table| health::check(table, protocol, mode, mixes_families, reader);
            let check = service.health.as_ref().and_then(check);
            let (Some(name), Some(address), Some(policy)) = (name, address, service.policy.value) else { continue };
            if mode.timestamps == Timestamps::LoadBalancer {
                check_ids_fit(name, pool.iter().map(|position| &self.servers[*position]), reader);
            }
            services.push(ServiceConfig {
                name: name.clone(),
                address,
                mode,
                other_balancer: transfer::other_balancer(service, address, mode, reader),
                policy: policy.0,
                slow_start: service.slow_start.map_or(Duration::ZERO, |BoundedDuration(time)| time),
                buckets: service.buckets.unwrap_or(self.buckets),
                check,
                when_all_down: service.when_all_down,
                servers: pool,
                span: entry.span(),
            });
        }
        transfer::check_uniform_stamping(&services, self.servers, listed, reader);
        services
    }

    /// Rejects a server at the address of a VIP: every server has the VIP on its loopback, so it would be unreachable.
    fn reject_server_address(&self, vip: IpAddr, span: &Span, reader: &mut Reader<'_>) {
        if let Some(server) = self.servers.iter().find(|server| server.address == vip) {
            let message =
                format!("VIP {vip} is also the address of server {:?}: expected an address of its own", server.name);
            reader.report(span.clone(), message);
        }
    }

    /// Returns the positions of the service's servers, or of all servers if the service lists none.
    fn pool(&self, service: &Service, positions: &HashMap<&str, usize>, reader: &mut Reader<'_>) -> Vec<usize> {
        let Some(listed) = &service.servers else {
            return (0..self.servers.len()).collect();
        };
        let mut members = UniqueValues::new("server of this service");
        let mut pool = Vec::with_capacity(listed.len());
        for name in listed {
            members.insert(Some(name.get_ref()), &name.span(), reader);
            match positions.get(name.get_ref().as_str()) {
                Some(position) => pool.push(*position),
                // A server with another mistake still exists.
                None if self.names.contains(name.get_ref().as_str()) => {}
                None => {
                    let name = (name.get_ref().as_str(), name.span());
                    let message = format_args!("server {:?} does not exist: expected the name of a [[server]]", name.0);
                    reader.report_unknown_name(name.1, message, name.0, self.names.iter().copied());
                }
            }
        }
        pool
    }
}

/// Checks that the server ids fit the cookie of LB-side stamping, in which ids have fewer bits.
fn check_ids_fit<'a>(service: &str, pool: impl Iterator<Item = &'a ServerConfig>, reader: &mut Reader<'_>) {
    for (id, span) in pool.filter_map(|server| server.id.as_ref()).filter(|(id, _)| !lb_stamping::can_name(*id)) {
        let message = format_args!(
            "server id {id} in service {service:?}, whose timestamps are by \"lb\": expected 0 to {}, the bits that \
             its \
             cookies hold, or none to have one drawn",
            lb_stamping::SERVER_ID_COUNT - 1
        );
        reader.report(span.clone(), message);
    }
}
