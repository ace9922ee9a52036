//! Random fleet documents, each of which differs from the previous one, and invalid documents.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::SocketAddr;

use coreward_model::rss::{seeded_rng, uniform_below};
use rand_xoshiro::Xoshiro256PlusPlus;

use crate::addresses::{rack_controller_name, server_address};
use crate::network_options::TestbedNetworkOptions;

/// Number of the [`seeded_rng`] stream from which the configuration changes are drawn.
const RNG_STREAM_CONFIG_CHANGES: u64 = 0x6368_6102;
/// Minimum number of servers that must accept new connections in every document.
const MIN_ACTIVE_SERVERS: usize = 2;
const POLICY_NAMES: [&str; 6] = ["crossrss", "crossrss-plus", "rr", "hash", "least", "pow2"];

/// Settings of one server in the fleet document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FleetServerEntry {
    is_draining: bool,
    weight: u32,
    /// Whether the server's agent must connect to a controller directly instead of through a rack controller.
    bypasses_rack_controllers: bool,
}

const INITIAL_SERVER_ENTRY: FleetServerEntry =
    FleetServerEntry { is_draining: false, weight: 1, bypasses_rack_controllers: false };

/// Generator of random fleet documents. It keeps the contents of the newest document.
#[derive(Debug, Clone)]
pub struct DocumentGenerator {
    rng: Xoshiro256PlusPlus,
    services: Vec<(String, SocketAddr, &'static str)>,
    service_policies: Vec<&'static str>,
    network_options: TestbedNetworkOptions,
    server_entries: BTreeMap<u16, Option<FleetServerEntry>>,
    /// Numbers of the rack controllers that each server's agent may use. The key is the server's number.
    rack_numbers_by_server: BTreeMap<u16, Vec<u16>>,
    report_interval_ms: u32,
    document_revision: u64,
}

impl DocumentGenerator {
    /// Creates a generator whose first document has all `servers` active. Each of `services` has a name, an address and
    /// further configuration lines. `rack_numbers_by_server` contains each server's rack controllers, and is empty
    /// without racks.
    pub fn new(
        seed: u64,
        network_options: TestbedNetworkOptions,
        servers: &[u16],
        services: Vec<(String, SocketAddr, &'static str)>,
        rack_numbers_by_server: BTreeMap<u16, Vec<u16>>,
    ) -> Self {
        Self {
            rng: seeded_rng(seed, RNG_STREAM_CONFIG_CHANGES),
            service_policies: vec![POLICY_NAMES[0]; services.len()],
            services,
            network_options,
            server_entries: servers.iter().map(|number| (*number, Some(INITIAL_SERVER_ENTRY))).collect(),
            rack_numbers_by_server,
            report_interval_ms: 100,
            document_revision: 0,
        }
    }

    /// Returns the text of the newest document, with a revision number that makes it unique.
    pub fn document_text(&self) -> String {
        let mut text = format!("# {}\nreport_interval = \"{}ms\"\n", self.document_revision, self.report_interval_ms);
        let rack_numbers: BTreeSet<u16> = self.rack_numbers_by_server.values().flatten().copied().collect();
        let _ = writeln!(text, "racks = {:?}", rack_controller_names(&rack_numbers));
        for (number, entry) in &self.server_entries {
            let Some(FleetServerEntry { is_draining: draining, weight, bypasses_rack_controllers: needs_controller }) =
                entry
            else {
                continue;
            };
            let (address, state) = (
                self.network_options.family.host_address(server_address(*number)),
                if *draining { "draining" } else { "active" },
            );
            let _ = writeln!(
                text,
                "\n[[server]]\nname = \"s{number}\"\naddress = \"{address}\"\nstate = \"{state}\"\nweight = {weight}"
            );
            let racks = self.rack_numbers_by_server.get(number).into_iter().flatten().filter(|_| !needs_controller);
            let _ = writeln!(text, "racks = {:?}", rack_controller_names(racks));
        }
        let forwarding_name = self.network_options.forwarding.name();
        for ((name, address, extra_config), policy) in self.services.iter().zip(&self.service_policies) {
            let _ = write!(
                text,
                "\n[[service]]\nname = \"{name}\"\nvip = \"{address}\"\npolicy = \"{policy}\"\n\
                 forwarding = \"{forwarding_name}\"\n{extra_config}"
            );
        }
        text
    }

    pub fn current_server_numbers(&self) -> BTreeSet<u16> {
        self.server_entries.iter().filter(|(_, entry)| entry.is_some()).map(|(number, _)| *number).collect()
    }

    /// Returns the server to drain next, or `None` if too few other servers would accept new connections.
    /// `drained_servers` contains servers that are or may be drained.
    pub fn next_server_to_drain(&mut self, drained_servers: &BTreeSet<u16>) -> Option<u16> {
        let undrained_servers: Vec<u16> =
            self.current_server_numbers().into_iter().filter(|number| !drained_servers.contains(number)).collect();
        let number = *undrained_servers.get(self.random_number_below(undrained_servers.len().max(1) as u32) as usize)?;
        self.can_remove_server(number, drained_servers).then_some(number)
    }

    /// Returns whether at least [`MIN_ACTIVE_SERVERS`] servers other than `number` accept new connections.
    fn can_remove_server(&self, number: u16, drained_servers: &BTreeSet<u16>) -> bool {
        let takes_connections = |(other_number, entry): &(&u16, &Option<FleetServerEntry>)| {
            **other_number != number
                && entry.is_some_and(|entry| !entry.is_draining)
                && !drained_servers.contains(other_number)
        };
        self.server_entries.iter().filter(takes_connections).count() >= MIN_ACTIVE_SERVERS
    }

    /// Makes one random change to the document. `drained_servers` contains servers that are or may be drained by
    /// command.
    pub fn apply_random_change(&mut self, drained_servers: &BTreeSet<u16>) {
        self.document_revision += 1;
        match self.random_number_below(8) {
            0 => {
                let service_index = self.random_number_below(self.service_policies.len() as u32) as usize;
                self.service_policies[service_index] =
                    POLICY_NAMES[self.random_number_below(POLICY_NAMES.len() as u32) as usize];
            }
            1 => self.report_interval_ms = [50, 100, 200][self.random_number_below(3) as usize],
            // Change only the comment that contains the revision number.
            2 => {}
            _ => self.change_random_server(drained_servers),
        }
    }

    fn change_random_server(&mut self, drained_servers: &BTreeSet<u16>) {
        let server_numbers: Vec<u16> = self.server_entries.keys().copied().collect();
        let server_number = server_numbers[self.random_number_below(server_numbers.len() as u32) as usize];
        let can_be_removed = self.can_remove_server(server_number, drained_servers);
        let entry = match self.random_number_below(5) {
            0 if can_be_removed => None,
            1 if can_be_removed => Some(FleetServerEntry { is_draining: true, ..INITIAL_SERVER_ENTRY }),
            2 => Some(FleetServerEntry { weight: 1 + self.random_number_below(4), ..INITIAL_SERVER_ENTRY }),
            3 => Some(FleetServerEntry { bypasses_rack_controllers: true, ..INITIAL_SERVER_ENTRY }),
            _ => Some(INITIAL_SERVER_ENTRY),
        };
        self.server_entries.insert(server_number, entry);
    }

    pub fn generate_invalid_document(&mut self) -> String {
        let text = self.document_text();
        match self.random_number_below(5) {
            0 => format!("{text}no_such_key = 1\n"),
            1 => text.replacen("[[service]]", "[[service]", 1),
            2 => text.replacen("policy = \"", "policy = \"no-such-", 1),
            3 => format!("{text}\n[[server]]\nname = \"s1\"\naddress = \"10.1.9.9\"\n\n[[server]]\nname = \"s1\"\n"),
            _ => text.replacen(":80\"", ":80000\"", 1),
        }
    }

    /// Makes all servers active and restores the initial policies.
    pub fn restore_initial_document(&mut self) {
        self.document_revision += 1;
        self.service_policies.fill(POLICY_NAMES[0]);
        self.server_entries.values_mut().for_each(|entry| *entry = Some(INITIAL_SERVER_ENTRY));
    }

    fn random_number_below(&mut self, upper_bound: u32) -> u32 {
        uniform_below(&mut self.rng, upper_bound)
    }
}

fn rack_controller_names<'a>(racks: impl IntoIterator<Item = &'a u16>) -> Vec<String> {
    racks.into_iter().map(|rack| rack_controller_name(*rack)).collect()
}

#[cfg(test)]
mod tests {
    use coreward_config::TomlSource;
    use coreward_fleet::config::FleetConfig;

    use super::*;
    use crate::addresses::AddressFamily;

    fn build_generator_with_one_service(seed: u64, family: AddressFamily) -> DocumentGenerator {
        let services = vec![("web".to_owned(), SocketAddr::new(family.nth_vip(0), 80), "")];
        DocumentGenerator::new(
            seed,
            TestbedNetworkOptions { family, ..TestbedNetworkOptions::default() },
            &[1, 2, 3, 4],
            services,
            (1..=4).map(|number| (number, vec![1, 2])).collect(),
        )
    }

    #[test]
    fn random_documents_parse_and_invalid_ones_are_rejected() {
        let parse_document = |text: String| FleetConfig::parse(&TomlSource::from_text("fleet.toml", &text));
        for family in [AddressFamily::Ipv4, AddressFamily::Ipv6] {
            let mut generator = build_generator_with_one_service(1, family);
            for _ in 0..300 {
                generator.apply_random_change(&BTreeSet::new());
                parse_document(generator.document_text()).unwrap();
                parse_document(generator.generate_invalid_document()).unwrap_err();
            }
        }
    }

    #[test]
    fn two_servers_always_accept_connections_despite_drains() {
        let (mut generator, mut drained_servers) =
            (build_generator_with_one_service(2, AddressFamily::Ipv4), BTreeSet::new());
        for round in 0..1_000 {
            generator.apply_random_change(&drained_servers);
            match round % 7 {
                0 => drained_servers.extend(generator.next_server_to_drain(&drained_servers)),
                3 => drop(drained_servers.pop_first()),
                _ => {}
            }
            drained_servers.retain(|number| generator.current_server_numbers().contains(number));
            let takes_connections = |(number, entry): &(&u16, &Option<FleetServerEntry>)| {
                entry.is_some_and(|entry| !entry.is_draining) && !drained_servers.contains(number)
            };
            assert!(
                generator.server_entries.iter().filter(takes_connections).count() >= MIN_ACTIVE_SERVERS,
                "turn {round}: {drained_servers:?}"
            );
        }
    }
}
