//! Migration of services from and to another load balancer, by `migrate_from` and `migrate_to`.

use std::collections::HashMap;

use coreward_config::{Spanned, TomlReader};
use coreward_model::consistency::ServiceSettings;
use coreward_model::tuple::{ServiceAddress, TransportProtocol};

use super::service::FleetServiceTable;
use super::{FleetServerConfig, FleetServiceConfig, MigrationLoadBalancer};

/// Returns the other load balancer of a migrating service, or `None` if the service does not migrate. Stores mistakes
/// in the reader.
pub fn parse_other_balancer(
    service: &FleetServiceTable,
    address: ServiceAddress,
    mode: ServiceSettings,
    reader: &mut TomlReader<'_>,
) -> Option<MigrationLoadBalancer> {
    let (key, migration_entry) = match (&service.migrate_from, &service.migrate_to) {
        (None, None) => return None,
        (Some(from), None) => ("migrate_from", from),
        (None, Some(to)) => ("migrate_to", to),
        (Some(_), Some(to)) => {
            reader.report_mistake(to.span(), "`migrate_to` with `migrate_from`: expected one of the two");
            return None;
        }
    };
    if address.protocol == TransportProtocol::Udp {
        let message = format!("`{key}` of a UDP service, whose datagrams do not show what begins a flow: expected TCP");
        reader.report_mistake(migration_entry.span(), message);
    } else if mode.forwarding.encapsulates() {
        let message = format!(
            "`{key}` with forwarding {:?}: expected \"l2\", as the other load balancer is reached by its MAC address",
            mode.forwarding.name()
        );
        reader.report_mistake(migration_entry.span(), message);
    } else if !mode.can_migrate() {
        let message = format!(
            "`{key}` with consistency {:?} and timestamps by {:?}: expected consistency \"stateless\", \"stateful\" or \
             \"hash-table\", and timestamps by \"server\" or \"off\"",
            mode.consistency.name(),
            mode.timestamps.name()
        );
        reader.report_mistake(migration_entry.span(), message);
    }
    let other_address = migration_entry.get_ref().0;
    if other_address == address.vip_and_port.ip() {
        let message = format!("`{key}` is the VIP {other_address}: expected the load balancer's own address");
        reader.report_mistake(migration_entry.span(), message);
    }
    Some(MigrationLoadBalancer { address: other_address, takes_new_connections: service.migrate_to.is_some() })
}

/// Checks that each server stamps the new connections of all its services or of none. The server's kernel has only one
/// setting for all services.
pub fn check_uniform_connection_stamping(
    services: &[FleetServiceConfig],
    servers: &[FleetServerConfig],
    service_entries: &[Spanned<FleetServiceTable>],
    reader: &mut TomlReader<'_>,
) {
    let is_handed_over =
        |service: &FleetServiceConfig| service.other_balancer.is_some_and(|other| other.takes_new_connections);
    let stamped_services = || services.iter().filter(|service| service.settings.servers_stamp_packets());
    let mut kept_service_index_by_server: HashMap<usize, usize> = HashMap::new();
    for (service_index, kept_service) in services
        .iter()
        .enumerate()
        .filter(|(_, service)| service.settings.servers_stamp_packets() && !is_handed_over(service))
    {
        for position in &kept_service.server_positions {
            kept_service_index_by_server.entry(*position).or_insert(service_index);
        }
    }
    for leaving_service in stamped_services().filter(|service| is_handed_over(service)) {
        let to_kept_service = |position: &usize| Some((*kept_service_index_by_server.get(position)?, *position));
        let shared_server = leaving_service
            .server_positions
            .iter()
            .filter_map(to_kept_service)
            .min_by_key(|(kept_index, _)| *kept_index);
        let shared_server = shared_server.map(|(kept_index, position)| (&services[kept_index], &servers[position]));
        let Some((kept_service, server)) = shared_server else { continue };
        let leaving_entry = service_entries.iter().find(|entry| entry.span() == leaving_service.span);
        let Some(migration_entry) = leaving_entry.and_then(|entry| entry.get_ref().migrate_to.as_ref()) else {
            continue;
        };
        let message = format!(
            "service {:?} is handed over, but its server {:?} goes on stamping new connections of service {:?}, and a \
             server stamps those of all its services or of none: expected `migrate_to` in both",
            leaving_service.name, server.name, kept_service.name
        );
        reader.report_mistake(migration_entry.span(), message);
    }
}
