//! Checks that involve several values of the fleet document. An invalid value is reported once, without errors that
//! follow from it.

use std::collections::{BTreeSet, HashMap};
use std::net::IpAddr;
use std::time::Duration;

use coreward_config::{BoundedDuration, Span, Spanned, TomlReader, format_duration};
use coreward_intf as intf;
use coreward_model::consistency::CookieStamper;
use coreward_model::lb_stamping;
use coreward_model::placement::BucketCount;
use coreward_model::{ServerId, ServiceAddress};
use coreward_wire::ServiceIndex;

use super::file::{FleetFile, FleetServerTable};
use super::service::{self, FleetServiceTable};
use super::unique_values::UniqueValues;
use super::{
    DEFAULT_REPORT_INTERVAL, FleetConfig, FleetServerConfig, FleetServiceConfig, health, racks, service_migration,
};

/// Checks the fleet document and converts it. Mistakes are stored in the reader. After a mistake, the result is
/// incomplete.
pub fn check_and_convert_fleet(file: FleetFile, reader: &mut TomlReader<'_>) -> FleetConfig {
    let max_connection_lifetime = file.max_connection_lifetime.0;
    let key_rotation = file
        .key_rotation
        .map(|rotation_interval| checked_key_rotation_interval(&rotation_interval, max_connection_lifetime, reader));
    let allowed_racks = racks::parse_rack_names(file.racks.as_deref(), None, reader);
    let allowed_load_balancers = racks::parse_unique_names("load balancer", file.load_balancers.as_deref(), reader);
    let servers = parse_server_entries(&file.servers, allowed_racks.as_ref(), reader);
    let server_names = file.servers.iter().filter_map(|server| Some(server.get_ref().name.value.as_ref()?.0.as_str()));
    let service_checker = ServiceConfigChecker {
        server_names: server_names.collect(),
        servers: &servers,
        default_bucket_count: file.buckets,
    };
    let services = service_checker.parse_service_entries(&file.services, reader);
    check_service_count_per_server(&servers, &services, reader);
    FleetConfig {
        report_interval: file.report_interval.map_or(DEFAULT_REPORT_INTERVAL, |BoundedDuration(interval)| interval),
        table_timing: file.table_updates,
        table_lifetime: file.table_lifetime.0,
        load_ewma_alpha: file.load_ewma_alpha,
        max_connection_lifetime,
        key_rotation_interval: key_rotation,
        allowed_racks,
        allowed_load_balancers,
        servers,
        services,
        source: reader.source().clone(),
    }
}

fn check_service_count_per_server(
    servers: &[FleetServerConfig],
    services: &[FleetServiceConfig],
    reader: &mut TomlReader<'_>,
) {
    let mut service_count_by_server = vec![0u32; servers.len()];
    for server in services.iter().flat_map(|service| &service.server_positions) {
        service_count_by_server[*server] += 1;
    }
    let max_service_count = intf::MAX_SERVICES_OF_SERVER;
    for (server, count) in servers.iter().zip(service_count_by_server).filter(|(_, count)| *count > max_service_count) {
        let message = format!("server {:?} is in {count} services: expected at most {max_service_count}", server.name);
        reader.report_mistake(server.span.clone(), message);
    }
}

/// Checks that the interval between key rotations is at least the maximum lifetime of cookies, because each rotation
/// overwrites the previous key.
fn checked_key_rotation_interval<const MIN: u64, const MAX: u64>(
    interval: &Spanned<BoundedDuration<MIN, MAX>>,
    max_connection_lifetime: Duration,
    reader: &mut TomlReader<'_>,
) -> Duration {
    let BoundedDuration(rotation_interval) = *interval.get_ref();
    if rotation_interval < max_connection_lifetime {
        let [rotation_interval, max_connection_lifetime] =
            [rotation_interval, max_connection_lifetime].map(format_duration);
        let message = format!(
            "a key rotation every {rotation_interval}, but a cookie may live {max_connection_lifetime} \
             (`max_connection_lifetime`): expected no less than that"
        );
        reader.report_mistake(interval.span(), message);
    }
    rotation_interval
}

/// Returns the entries up to the maximum number. If there are more, reports a mistake at the first entry beyond it.
fn entries_within_limit<'a, T>(
    entries: &'a [Spanned<T>],
    max_count: usize,
    excess_message: impl FnOnce(usize) -> String,
    reader: &mut TomlReader<'_>,
) -> &'a [Spanned<T>] {
    let Some(first_excess_entry) = entries.get(max_count) else { return entries };
    reader.report_mistake(first_excess_entry.span(), excess_message(entries.len()));
    &entries[..max_count]
}

fn parse_server_entries(
    server_entries: &[Spanned<FleetServerTable>],
    known_racks: Option<&BTreeSet<String>>,
    reader: &mut TomlReader<'_>,
) -> Vec<FleetServerConfig> {
    let too_many_servers_message =
        |count: usize| format!("{count} servers: expected at most {}, all that a cookie holds", ServerId::COUNT);
    let listed_servers = entries_within_limit(server_entries, ServerId::COUNT, too_many_servers_message, reader);
    let mut names = UniqueValues::new("server name");
    let mut addresses = UniqueValues::new("server address");
    let mut ids = UniqueValues::new("server id");
    let mut servers = Vec::with_capacity(listed_servers.len());
    for entry in listed_servers {
        let server_entry = entry.get_ref();
        let name = server_entry.name.value.as_ref().map(|name| &name.0);
        let address = server_entry.address.value.map(|address| address.0);
        let id = server_entry.id.as_ref().map(|id| (*id.get_ref(), id.span()));
        names.insert(name, &server_entry.name.span, reader);
        addresses.insert(address, &server_entry.address.span, reader);
        if let Some((id, span)) = &id {
            ids.insert(Some(*id), span, reader);
        }
        let allowed_racks = racks::parse_rack_names(server_entry.racks.as_deref(), known_racks, reader);
        let (Some(name), Some(address)) = (name, address) else { continue };
        servers.push(FleetServerConfig {
            name: name.clone(),
            address,
            id,
            drain_state: server_entry.state,
            weight: server_entry.weight,
            capacity: server_entry.capacity,
            vlan: server_entry.vlan.unwrap_or_default(),
            allowed_racks,
            span: entry.span(),
        });
    }
    servers
}

struct ServiceConfigChecker<'a> {
    /// Names of all servers, including servers with mistakes.
    server_names: BTreeSet<&'a str>,
    servers: &'a [FleetServerConfig],
    default_bucket_count: BucketCount,
}

impl ServiceConfigChecker<'_> {
    fn parse_service_entries(
        &self,
        entries: &[Spanned<FleetServiceTable>],
        reader: &mut TomlReader<'_>,
    ) -> Vec<FleetServiceConfig> {
        let too_many_services_message =
            |count: usize| format!("{count} services: expected at most {}", ServiceIndex::COUNT);
        // The services beyond the limit are skipped, because each of them may list all servers.
        let entries = entries_within_limit(entries, ServiceIndex::COUNT, too_many_services_message, reader);
        let server_position_by_name: HashMap<&str, usize> =
            self.servers.iter().enumerate().map(|(position, server)| (server.name.as_str(), position)).collect();
        let mut names = UniqueValues::new("service name");
        let mut vips = UniqueValues::new("VIP");
        let mut services = Vec::with_capacity(entries.len());
        for entry in entries {
            let name_entry = &entry.get_ref().name;
            names.insert(name_entry.value.as_ref().map(|name| &name.0), &name_entry.span, reader);
            services.extend(self.parse_service_entry(entry, &server_position_by_name, &mut vips, reader));
        }
        service_migration::check_uniform_connection_stamping(&services, self.servers, entries, reader);
        services
    }

    /// Checks a service, but not whether its name is unique. Returns `None` if a required value is missing or invalid.
    fn parse_service_entry(
        &self,
        entry: &Spanned<FleetServiceTable>,
        server_position_by_name: &HashMap<&str, usize>,
        vips: &mut UniqueValues<ServiceAddress>,
        reader: &mut TomlReader<'_>,
    ) -> Option<FleetServiceConfig> {
        let service_entry = entry.get_ref();
        let server_positions = self.find_server_positions(service_entry, server_position_by_name, reader);
        let protocol = service_entry.protocol.value?;
        let service_mode = service::parse_service_settings(service_entry, protocol, reader);
        let service_address = service_entry.vip.value.map(|vip| vip.with_protocol(protocol));
        vips.insert(service_address, &service_entry.vip.span, reader);
        if let Some(address) = service_address {
            self.reject_server_at_vip(address.vip_and_port.ip(), &service_entry.vip.span, reader);
        }
        let has_mixed_address_families = self.has_mixed_address_families(service_address, &server_positions);
        let parse_health_check_table =
            |table| health::parse_health_check(table, protocol, service_mode, has_mixed_address_families, reader);
        let health_check = service_entry.health.as_ref().and_then(parse_health_check_table);
        let (name, address) = (&service_entry.name.value.as_ref()?.0, service_address?);
        let policy = service_entry.policy.value?;
        if service_mode.timestamps == CookieStamper::LoadBalancer {
            check_server_ids_fit_cookie(name, server_positions.iter().map(|position| &self.servers[*position]), reader);
        }
        Some(FleetServiceConfig {
            name: name.clone(),
            address,
            settings: service_mode,
            other_balancer: service_migration::parse_other_balancer(service_entry, address, service_mode, reader),
            policy_name: policy.0,
            slow_start_duration: service_entry.slow_start.map_or(Duration::ZERO, |BoundedDuration(time)| time),
            bucket_count: service_entry.buckets.unwrap_or(self.default_bucket_count),
            health_check,
            when_all_down: service_entry.when_all_down,
            server_positions,
            span: entry.span(),
        })
    }

    /// Returns whether the address of at least one of the servers has another family than the VIP.
    fn has_mixed_address_families(&self, service_address: Option<ServiceAddress>, server_positions: &[usize]) -> bool {
        let Some(service_address) = service_address else { return false };
        let is_vip_ipv4 = service_address.vip_and_port.is_ipv4();
        server_positions.iter().any(|position| self.servers[*position].address.is_ipv4() != is_vip_ipv4)
    }

    /// Rejects a server whose address is a VIP. It would be unreachable, because every server has the VIP on its
    /// loopback.
    fn reject_server_at_vip(&self, vip: IpAddr, span: &Span, reader: &mut TomlReader<'_>) {
        if let Some(server) = self.servers.iter().find(|server| server.address == vip) {
            let message =
                format!("VIP {vip} is also the address of server {:?}: expected an address of its own", server.name);
            reader.report_mistake(span.clone(), message);
        }
    }

    /// Returns the positions of the service's servers, or those of all servers if the service lists none.
    fn find_server_positions(
        &self,
        service: &FleetServiceTable,
        server_position_by_name: &HashMap<&str, usize>,
        reader: &mut TomlReader<'_>,
    ) -> Vec<usize> {
        let Some(member_names) = &service.servers else {
            return (0..self.servers.len()).collect();
        };
        let mut unique_member_names = UniqueValues::new("server of this service");
        let mut member_positions = Vec::with_capacity(member_names.len());
        for name in member_names {
            unique_member_names.insert(Some(name.get_ref()), &name.span(), reader);
            match server_position_by_name.get(name.get_ref().as_str()) {
                Some(position) => member_positions.push(*position),
                // A server that another mistake excluded still exists.
                None if self.server_names.contains(name.get_ref().as_str()) => {}
                None => {
                    let name_and_span = (name.get_ref().as_str(), name.span());
                    let message =
                        format_args!("server {:?} does not exist: expected the name of a [[server]]", name_and_span.0);
                    reader.report_unknown_name(
                        name_and_span.1,
                        message,
                        name_and_span.0,
                        self.server_names.iter().copied(),
                    );
                }
            }
        }
        member_positions
    }
}

/// Checks that the server ids fit into the cookies of LB-side stamping, in which server ids have fewer bits.
fn check_server_ids_fit_cookie<'a>(
    service_name: &str,
    pool_servers: impl Iterator<Item = &'a FleetServerConfig>,
    reader: &mut TomlReader<'_>,
) {
    for (id, span) in
        pool_servers.filter_map(|server| server.id.as_ref()).filter(|(id, _)| !lb_stamping::can_carry_server_id(*id))
    {
        let message = format_args!(
            "server id {id} in service {service_name:?}, whose timestamps are by \"lb\": expected 0 to {}, the bits \
             that its cookies hold, or none to have one drawn",
            lb_stamping::STAMPABLE_SERVER_ID_COUNT - 1
        );
        reader.report_mistake(span.clone(), message);
    }
}
