//! The perfect hash in which BPF programs find a service (`bpf/include/service.h`), at the load balancer and on
//! servers.

use std::collections::BTreeSet;

use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::rss::seeded_rng;
use rand::Rng as _;

/// Stream of [`seeded_rng`] from which seeds are drawn.
const RNG_STREAM_SLOT_SEEDS: u64 = 16;
/// Maximum number of seeds that are tried. On a server with 128 keys in 1024 slots one seed in 4,000 fits, so all of
/// these fail with probability e^-250. At the load balancer most seeds fit.
const SEEDS_TRIED: usize = 1 << 20;

/// Reason why no directory can be built for a list of services.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// There are more services than the directory holds.
    #[error("{0} services: expected at most {1}")]
    TooMany(usize, u32),
    /// Two services have the same VIP, port and protocol.
    #[error("service {0} is listed twice")]
    Duplicate(ServiceAddress),
    /// A service has port 0, which is no valid port.
    #[error("service {0}: expected a port from 1 to 65535")]
    PortZero(ServiceAddress),
    /// All [`MAX_TRIED_SEEDS`] seeds failed, which does not happen in practice.
    #[error("no perfect hash was found for {0} services")]
    NoSeed(usize),
}

/// Returns the last 64 bits of a service's key (`struct service_key` of `bpf/include/intf.h`). They identify an IPv4
/// service.
fn tail(key: &intf::service_key) -> u64 {
    u64::from(key.address[3]) | u64::from(key.port) << 32 | u64::from(key.protocol) << 48 | u64::from(key.family) << 56
}

/// Returns the word that is hashed to find a service's slot: the last 64 bits of its key, for IPv6 combined with the
/// rest of the address.
pub(crate) fn service_word(key: &intf::service_key) -> u64 {
    if u32::from(key.family) == intf::ADDRESS_FAMILY_IPV4 {
        return tail(key);
    }
    let [first, middle, upper, _] = key.address.map(u64::from);
    let mixed = first.wrapping_mul(intf::SERVICE_WORD_FIRST_FACTOR);
    tail(key) ^ mixed ^ (middle | upper << 32).wrapping_mul(intf::SERVICE_WORD_MIDDLE_FACTOR)
}

/// Returns the index in `forwarded_services` (`bpf/include/server.h`) of the service with this hash word.
pub(crate) fn forwarded_slot(word: u64) -> usize {
    (word.wrapping_mul(intf::FORWARDED_SERVICE_FACTOR) >> intf::FORWARDED_SERVICE_SHIFT) as usize
}

fn slot(word: u64, seed: u64) -> usize {
    (word.wrapping_mul(seed) >> intf::SERVICE_SLOT_SHIFT) as usize
}

/// Returns the group of a word in a load balancer's directory, and its slot before displacement.
fn group_and_slot(word: u64, seed: u64) -> (usize, u16) {
    let hash = word.wrapping_mul(seed);
    let slot = hash >> intf::LB_SERVICE_SLOT_SHIFT & u64::from(intf::LB_SERVICE_SLOTS - 1);
    ((hash >> intf::LB_SERVICE_GROUP_SHIFT) as usize, slot as u16)
}

/// Returns the only slot of `directory` in which a service with this hash word may be.
fn lb_slot(directory: &intf::lb_service_directory, word: u64) -> usize {
    let (group, slot) = group_and_slot(word, directory.seed);
    usize::from(slot ^ directory.displacement[group])
}

/// Returns a server's directory: the number of each service, and [`SERVICE_ADDRESS_ONLY`](intf::SERVICE_ADDRESS_ONLY)
/// for each VIP (port and protocol 0). Fails for the reasons of [`DirectoryError`].
pub fn build_directory(services: &[(ServiceAddress, u32)]) -> Result<Box<intf::service_directory>, DirectoryError> {
    let mut directory: Box<intf::service_directory> = zerocopy::FromZeros::new_box_zeroed().expect("32 KB of memory");
    let slots = build_slots(services, intf::MAX_SERVICES_OF_SERVER)?;
    let words: Vec<u64> = slots.iter().map(|slot| service_word(&slot.key)).collect();
    directory.seed = find_seed(&words).ok_or(DirectoryError::NoSeed(services.len()))?;
    for (new, word) in slots.into_iter().zip(words) {
        directory.slots[slot(word, directory.seed)] = new;
    }
    Ok(directory)
}

/// Builds a load balancer's directory, with the same entries. Fails for the reasons in [`DirectoryError`].
pub fn lb_directory(services: &[(ServiceAddress, u32)]) -> Result<Box<intf::lb_service_directory>, DirectoryError> {
    let mut directory: Box<intf::lb_service_directory> =
        zerocopy::FromZeros::new_box_zeroed().expect("140 KB of memory");
    let slots = build_slots(services, intf::MAX_SERVICES)?;
    let words: Vec<u64> = slots.iter().map(|slot| service_word(&slot.key)).collect();
    let (seed, displacement) = perfect_hash(&words).ok_or(DirectoryError::NoSeed(services.len()))?;
    (directory.seed, directory.displacement) = (seed, displacement);
    for (new, word) in slots.into_iter().zip(words) {
        let slot = lb_slot(&directory, word);
        directory.slots[slot] = new;
    }
    Ok(directory)
}

fn build_slots(services: &[(ServiceAddress, u32)], most: u32) -> Result<Vec<intf::service_slot>, DirectoryError> {
    if services.len() > most as usize {
        return Err(DirectoryError::TooMany(services.len(), most));
    }
    let mut seen = BTreeSet::new();
    let mut slots = Vec::new();
    for (address, number) in services {
        if address.socket.port() == 0 {
            return Err(DirectoryError::PortZero(*address));
        }
        if !seen.insert(*address) {
            return Err(DirectoryError::Duplicate(*address));
        }
        slots.push(intf::service_slot { number: *number, key: address.key(), reserved: 0 });
    }
    let vips: BTreeSet<_> = services.iter().map(|(address, _)| VipKey::of(address)).collect();
    slots.extend(vips.into_iter().map(|VipKey { address, family }| intf::service_slot {
        number: intf::SERVICE_ADDRESS_ONLY,
        key: intf::service_key { address, port: 0, protocol: 0, family },
        reserved: 0,
    }));
    Ok(slots)
}

/// Address of a VIP, without port and protocol.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct VipKey {
    address: [u32; 4],
    family: u8,
}

impl VipKey {
    fn of(service: &ServiceAddress) -> Self {
        let key = service.key();
        Self { address: key.address, family: key.family }
    }
}

fn find_seed(words: &[u64]) -> Option<u64> {
    let mut rng = seeded_rng(0, RNG_STREAM_SLOT_SEEDS);
    (0..SEEDS_TRIED).map(|_| rng.next_u64() | 1).find(|seed| {
        let mut used = [false; intf::SERVICE_SLOTS as usize];
        words.iter().all(|word| !std::mem::replace(&mut used[slot(*word, *seed)], true))
    })
}

type Displacement = [u16; intf::LB_SERVICE_GROUPS as usize];

/// Finds a seed and displacements by which all words have different slots; `None`: no tried seed fits.
fn perfect_hash(words: &[u64]) -> Option<(u64, Displacement)> {
    let mut rng = seeded_rng(0, RNG_STREAM_SLOT_SEEDS);
    let mut seeds = (0..SEEDS_TRIED).map(|_| rng.next_u64() | 1);
    seeds.find_map(|seed| Some((seed, displacements(words, seed)?)))
}

/// Finds displacements by which all words have different slots with this seed. The largest groups choose first.
fn displacements(words: &[u64], seed: u64) -> Option<Displacement> {
    let mut groups: Vec<(usize, Vec<u16>)> =
        (0..intf::LB_SERVICE_GROUPS as usize).map(|group| (group, Vec::new())).collect();
    for word in words {
        let (group, slot) = group_and_slot(*word, seed);
        groups[group].1.push(slot);
    }
    groups.sort_by_key(|(_, slots)| std::cmp::Reverse(slots.len()));
    let mut used = [false; intf::LB_SERVICE_SLOTS as usize];
    let mut displacements = [0; intf::LB_SERVICE_GROUPS as usize];
    for (group, mut slots) in groups.into_iter().take_while(|(_, slots)| !slots.is_empty()) {
        slots.sort_unstable();
        if slots.windows(2).any(|pair| pair[0] == pair[1]) {
            return None;
        }
        let fits = |displacement: &u16| slots.iter().all(|slot| !used[usize::from(slot ^ displacement)]);
        let displacement = (0..intf::LB_SERVICE_SLOTS as u16).find(fits)?;
        slots.iter().for_each(|slot| used[usize::from(slot ^ displacement)] = true);
        displacements[group] = displacement;
    }
    Some(displacements)
}

#[cfg(test)]
mod tests {
    use coreward_model::tuple::Protocol;

    use super::*;

    fn service(text: &str) -> ServiceAddress {
        ServiceAddress { socket: text.parse().unwrap(), protocol: Protocol::Tcp }
    }

    /// Returns `count` services on different VIPs, half of them IPv6. The last service is UDP at the first service's
    /// VIP. No port is 0 or 1, in either byte order.
    fn many(count: u32) -> Vec<(ServiceAddress, u32)> {
        let address = |n: u32| match n % 2 {
            0 => format!("10.{}.{}.1:{}", 200 + n / 256, n % 256, 1024 + n),
            _ => format!("[2001:db8:{n:x}::1]:{}", 1024 + n),
        };
        let mut services: Vec<_> = (0..count - 1).map(|n| (service(&address(n)), n)).collect();
        services.push((ServiceAddress { protocol: Protocol::Udp, ..services[0].0 }, count - 1));
        services
    }

    /// Checks that all services and VIPs are found, and other ports are not. `found` returns the slot that a program
    /// reads for a word.
    fn all_are_found(services: &[(ServiceAddress, u32)], found: impl Fn(u64) -> intf::service_slot) {
        let find = |key| Some(found(service_word(&key))).filter(|slot| slot.key == key).map(|slot| slot.number);
        for (address, number) in services {
            let key = address.key();
            assert_eq!(find(key), Some(*number));
            let vip = intf::service_key { port: 0, protocol: 0, ..key };
            assert_eq!(find(vip), Some(intf::SERVICE_ADDRESS_ONLY));
            assert_eq!(find(intf::service_key { port: 0, ..key }), None);
            assert_eq!(find(intf::service_key { port: 1, ..key }), None);
        }
    }

    /// The service is looked up as by `find_service` in bpf/include/service.h.
    #[test]
    fn server_finds_the_maximum_of_services() {
        let services = many(intf::MAX_SERVICES_OF_SERVER);
        let directory = build_directory(&services).unwrap();
        all_are_found(&services, |word| directory.slots[slot(word, directory.seed)]);
    }

    /// The service is looked up as by `find_lb_service` in bpf/include/service.h.
    #[test]
    fn load_balancer_finds_the_maximum_of_services() {
        for count in [2, 64, intf::MAX_SERVICES] {
            let services = many(count);
            let directory = lb_directory(&services).unwrap();
            all_are_found(&services, |word| directory.slots[lb_slot(&directory, word)]);
        }
    }

    #[test]
    fn invalid_service_lists_are_rejected() {
        let text = |services: &[(ServiceAddress, u32)]| build_directory(services).unwrap_err().to_string();
        let listed = service("10.0.0.1:80");
        assert_eq!(text(&[(listed, 0), (listed, 1)]), "service 10.0.0.1:80/tcp is listed twice");
        assert_eq!(text(&vec![(listed, 0); 65]), "65 services: expected at most 64");
        let too_many = lb_directory(&vec![(listed, 0); 1025]).unwrap_err().to_string();
        assert_eq!(too_many, "1025 services: expected at most 1024");
        assert_eq!(text(&[(service("10.0.0.1:0"), 0)]), "service 10.0.0.1:0/tcp: expected a port from 1 to 65535");
    }
}
