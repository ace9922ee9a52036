//! Service directories, which are perfect hash tables in which BPF programs find a service (`bpf/include/service.h`).
//! The directories of load balancers and of servers have different layouts.

use std::collections::BTreeSet;

use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

/// Stream number of [`seeded_rng`] for random hash seeds.
const SLOT_SEED_RNG_STREAM: u64 = 16;
/// Maximum number of hash seeds to try. A seed fits if no two services share a slot. On a server with 128 keys in 1024
/// slots, one seed in 4,000 fits, so all tries fail with probability e^-250. On a load balancer, most seeds fit.
const MAX_TRIED_SLOT_SEEDS: usize = 1 << 20;

/// Reason why no service directory can be built for a list of services.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceDirectoryError {
    /// There are more services than the directory holds.
    #[error("{0} services: expected at most {1}")]
    TooManyServices(usize, u32),
    /// Two services have the same VIP, port and protocol.
    #[error("service {0} is listed twice")]
    DuplicateService(ServiceAddress),
    /// A service has port 0, which is no valid port.
    #[error("service {0}: expected a port from 1 to 65535")]
    PortZero(ServiceAddress),
    /// All [`MAX_TRIED_SLOT_SEEDS`] seeds failed, which does not happen in practice.
    #[error("no perfect hash was found for {0} services")]
    NoSuitableSeed(usize),
}

/// Returns the last 64 bits of a service's key (`struct service_key` of `bpf/include/intf.h`). They identify an IPv4
/// service.
fn last_service_key_word(key: &intf::service_key) -> u64 {
    u64::from(key.address[3]) | u64::from(key.port) << 32 | u64::from(key.protocol) << 48 | u64::from(key.family) << 56
}

/// Returns the word that is hashed to find a service's slot. It is the last 64 bits of the service's key, which are
/// mixed with the rest of the address for IPv6.
pub(crate) fn service_hash_word(key: &intf::service_key) -> u64 {
    if u32::from(key.family) == intf::ADDRESS_FAMILY_IPV4 {
        return last_service_key_word(key);
    }
    let [first, middle, upper, _] = key.address.map(u64::from);
    let mixed_first_word = first.wrapping_mul(intf::SERVICE_WORD_FIRST_FACTOR);
    last_service_key_word(key)
        ^ mixed_first_word
        ^ (middle | upper << 32).wrapping_mul(intf::SERVICE_WORD_MIDDLE_FACTOR)
}

/// Returns the index in `forwarded_services` (`bpf/include/server.h`) for the service with the hash word
/// `service_word`.
pub(crate) fn forwarded_service_index(service_word: u64) -> usize {
    (service_word.wrapping_mul(intf::FORWARDED_SERVICE_FACTOR) >> intf::FORWARDED_SERVICE_SHIFT) as usize
}

fn server_directory_slot_index(service_word: u64, seed: u64) -> usize {
    (service_word.wrapping_mul(seed) >> intf::SERVICE_SLOT_SHIFT) as usize
}

/// Returns the group of a service's hash word in a load balancer's directory, and its slot before the group's
/// displacement is applied.
fn group_and_undisplaced_slot(service_word: u64, seed: u64) -> (usize, u16) {
    let word_hash = service_word.wrapping_mul(seed);
    let undisplaced_slot = word_hash >> intf::LB_SERVICE_SLOT_SHIFT & u64::from(intf::LB_SERVICE_SLOTS - 1);
    ((word_hash >> intf::LB_SERVICE_GROUP_SHIFT) as usize, undisplaced_slot as u16)
}

/// Returns the index of the only slot of `directory` in which a service with the hash word `service_word` may be.
fn lb_directory_slot_index(directory: &intf::lb_service_directory, service_word: u64) -> usize {
    let (group, slot) = group_and_undisplaced_slot(service_word, directory.seed);
    usize::from(slot ^ directory.displacement[group])
}

/// Builds a server's service directory from the address and slot number of each service. The directory also contains an
/// entry for each VIP, with port and protocol 0 and the number [`SERVICE_ADDRESS_ONLY`](intf::SERVICE_ADDRESS_ONLY).
/// Fails for the reasons in [`ServiceDirectoryError`].
pub fn build_server_directory(
    services: &[(ServiceAddress, u32)],
) -> Result<Box<intf::service_directory>, ServiceDirectoryError> {
    let mut server_directory: Box<intf::service_directory> =
        zerocopy::FromZeros::new_box_zeroed().expect("32 KB of memory");
    let slots = build_service_slots(services, intf::MAX_SERVICES_OF_SERVER)?;
    let service_words: Vec<u64> = slots.iter().map(|slot| service_hash_word(&slot.key)).collect();
    server_directory.seed =
        find_server_directory_seed(&service_words).ok_or(ServiceDirectoryError::NoSuitableSeed(services.len()))?;
    for (slot, service_word) in slots.into_iter().zip(service_words) {
        server_directory.slots[server_directory_slot_index(service_word, server_directory.seed)] = slot;
    }
    Ok(server_directory)
}

/// Builds a load balancer's service directory, with the same entries as [`build_server_directory`]. Fails for the
/// reasons in [`ServiceDirectoryError`].
pub fn build_lb_directory(
    services: &[(ServiceAddress, u32)],
) -> Result<Box<intf::lb_service_directory>, ServiceDirectoryError> {
    let mut lb_directory: Box<intf::lb_service_directory> =
        zerocopy::FromZeros::new_box_zeroed().expect("140 KB of memory");
    let slots = build_service_slots(services, intf::MAX_SERVICES)?;
    let service_words: Vec<u64> = slots.iter().map(|slot| service_hash_word(&slot.key)).collect();
    let (seed, displacement) =
        find_perfect_hash(&service_words).ok_or(ServiceDirectoryError::NoSuitableSeed(services.len()))?;
    (lb_directory.seed, lb_directory.displacement) = (seed, displacement);
    for (slot, service_word) in slots.into_iter().zip(service_words) {
        let slot_index = lb_directory_slot_index(&lb_directory, service_word);
        lb_directory.slots[slot_index] = slot;
    }
    Ok(lb_directory)
}

fn build_service_slots(
    services: &[(ServiceAddress, u32)],
    max_services: u32,
) -> Result<Vec<intf::service_slot>, ServiceDirectoryError> {
    if services.len() > max_services as usize {
        return Err(ServiceDirectoryError::TooManyServices(services.len(), max_services));
    }
    let mut distinct_services = BTreeSet::new();
    let mut service_slots = Vec::new();
    for (address, number) in services {
        if address.vip_and_port.port() == 0 {
            return Err(ServiceDirectoryError::PortZero(*address));
        }
        if !distinct_services.insert(*address) {
            return Err(ServiceDirectoryError::DuplicateService(*address));
        }
        service_slots.push(intf::service_slot { number: *number, key: address.to_service_key(), reserved: 0 });
    }
    let distinct_vips: BTreeSet<_> = services.iter().map(|(address, _)| VipKey::from_service(address)).collect();
    service_slots.extend(distinct_vips.into_iter().map(|VipKey { address, family }| intf::service_slot {
        number: intf::SERVICE_ADDRESS_ONLY,
        key: intf::service_key { address, port: 0, protocol: 0, family },
        reserved: 0,
    }));
    Ok(service_slots)
}

/// IP address of a VIP, without port and protocol, in the form of a service key.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct VipKey {
    address: [u32; 4],
    family: u8,
}

impl VipKey {
    fn from_service(service: &ServiceAddress) -> Self {
        let service_key = service.to_service_key();
        Self { address: service_key.address, family: service_key.family }
    }
}

fn find_server_directory_seed(service_words: &[u64]) -> Option<u64> {
    let mut seed_rng = seeded_rng(0, SLOT_SEED_RNG_STREAM);
    (0..MAX_TRIED_SLOT_SEEDS).map(|_| seed_rng.next_u64() | 1).find(|seed| {
        let mut is_slot_used = [false; intf::SERVICE_SLOTS as usize];
        service_words.iter().all(|service_word| {
            !std::mem::replace(&mut is_slot_used[server_directory_slot_index(*service_word, *seed)], true)
        })
    })
}

type ServiceGroupDisplacements = [u16; intf::LB_SERVICE_GROUPS as usize];

/// Finds a hash seed and displacements that give all hash words different slots. Returns `None` if no tried seed fits.
fn find_perfect_hash(service_words: &[u64]) -> Option<(u64, ServiceGroupDisplacements)> {
    let mut seed_rng = seeded_rng(0, SLOT_SEED_RNG_STREAM);
    let mut tried_seeds = (0..MAX_TRIED_SLOT_SEEDS).map(|_| seed_rng.next_u64() | 1);
    tried_seeds.find_map(|seed| Some((seed, find_displacements(service_words, seed)?)))
}

/// Finds displacements that give all hash words different slots with the hash `seed`. The largest groups are placed
/// first.
fn find_displacements(service_words: &[u64], seed: u64) -> Option<ServiceGroupDisplacements> {
    let mut slots_by_group: Vec<(usize, Vec<u16>)> =
        (0..intf::LB_SERVICE_GROUPS as usize).map(|group| (group, Vec::new())).collect();
    for service_word in service_words {
        let (group, slot) = group_and_undisplaced_slot(*service_word, seed);
        slots_by_group[group].1.push(slot);
    }
    slots_by_group.sort_by_key(|(_, slots)| std::cmp::Reverse(slots.len()));
    let mut is_slot_used = [false; intf::LB_SERVICE_SLOTS as usize];
    let mut displacements = [0; intf::LB_SERVICE_GROUPS as usize];
    for (group, mut slots) in slots_by_group.into_iter().take_while(|(_, slots)| !slots.is_empty()) {
        slots.sort_unstable();
        if slots.windows(2).any(|adjacent_slots| adjacent_slots[0] == adjacent_slots[1]) {
            return None;
        }
        let is_free_for_group =
            |displacement: &u16| slots.iter().all(|slot| !is_slot_used[usize::from(slot ^ displacement)]);
        let displacement = (0..intf::LB_SERVICE_SLOTS as u16).find(is_free_for_group)?;
        slots.iter().for_each(|slot| is_slot_used[usize::from(slot ^ displacement)] = true);
        displacements[group] = displacement;
    }
    Some(displacements)
}

#[cfg(test)]
mod tests {
    use coreward_model::tuple::TransportProtocol;

    use super::*;

    fn parse_service(text: &str) -> ServiceAddress {
        ServiceAddress { vip_and_port: text.parse().unwrap(), protocol: TransportProtocol::Tcp }
    }

    /// Returns `count` services on different VIPs, half of which are IPv6. The last service is a UDP service at the
    /// first service's VIP. No port is 0 or 1 in either byte order.
    fn services_on_distinct_vips(count: u32) -> Vec<(ServiceAddress, u32)> {
        let format_service = |n: u32| match n % 2 {
            0 => format!("10.{}.{}.1:{}", 200 + n / 256, n % 256, 1024 + n),
            _ => format!("[2001:db8:{n:x}::1]:{}", 1024 + n),
        };
        let mut services: Vec<_> = (0..count - 1).map(|n| (parse_service(&format_service(n)), n)).collect();
        services.push((ServiceAddress { protocol: TransportProtocol::Udp, ..services[0].0 }, count - 1));
        services
    }

    /// Checks that all services and VIPs are found, and that other ports are not found. `find_slot` returns the slot
    /// that a program reads for a hash word.
    fn assert_all_services_found(services: &[(ServiceAddress, u32)], find_slot: impl Fn(u64) -> intf::service_slot) {
        let find_number =
            |key| Some(find_slot(service_hash_word(&key))).filter(|slot| slot.key == key).map(|slot| slot.number);
        for (address, number) in services {
            let service_key = address.to_service_key();
            assert_eq!(find_number(service_key), Some(*number));
            let vip_key = intf::service_key { port: 0, protocol: 0, ..service_key };
            assert_eq!(find_number(vip_key), Some(intf::SERVICE_ADDRESS_ONLY));
            assert_eq!(find_number(intf::service_key { port: 0, ..service_key }), None);
            assert_eq!(find_number(intf::service_key { port: 1, ..service_key }), None);
        }
    }

    /// The test searches for services as `find_service` in bpf/include/service.h does.
    #[test]
    fn server_directory_finds_the_maximum_number_of_services() {
        let services = services_on_distinct_vips(intf::MAX_SERVICES_OF_SERVER);
        let directory = build_server_directory(&services).unwrap();
        assert_all_services_found(&services, |service_word| {
            directory.slots[server_directory_slot_index(service_word, directory.seed)]
        });
    }

    /// The test searches for services as `find_lb_service` in bpf/include/service.h does.
    #[test]
    fn lb_directory_finds_the_maximum_number_of_services() {
        for count in [2, 64, intf::MAX_SERVICES] {
            let services = services_on_distinct_vips(count);
            let directory = build_lb_directory(&services).unwrap();
            assert_all_services_found(&services, |service_word| {
                directory.slots[lb_directory_slot_index(&directory, service_word)]
            });
        }
    }

    #[test]
    fn invalid_service_lists_are_rejected() {
        let error_text = |services: &[(ServiceAddress, u32)]| build_server_directory(services).unwrap_err().to_string();
        let listed_service = parse_service("10.0.0.1:80");
        assert_eq!(error_text(&[(listed_service, 0), (listed_service, 1)]), "service 10.0.0.1:80/tcp is listed twice");
        assert_eq!(error_text(&vec![(listed_service, 0); 65]), "65 services: expected at most 64");
        let too_many_error = build_lb_directory(&vec![(listed_service, 0); 1025]).unwrap_err().to_string();
        assert_eq!(too_many_error, "1025 services: expected at most 1024");
        assert_eq!(
            error_text(&[(parse_service("10.0.0.1:0"), 0)]),
            "service 10.0.0.1:0/tcp: expected a port from 1 to 65535"
        );
    }
}
