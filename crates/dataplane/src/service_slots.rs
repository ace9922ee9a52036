//! The perfect hash in which BPF programs find a service (`bpf/service.bpf.h`), at the load balancer and on servers.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use coreward_intf as intf;
use coreward_model::ServiceAddress;
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::address_words;
use rand::Rng as _;

/// [`seeded_rng`]'s stream for the seeds that are tried.
const PURPOSE_SLOT_SEEDS: u64 = 16;
/// With 128 keys in 1024 slots one seed in 4,000 fits; this many fail together with probability e^-250.
const SEEDS_TRIED: usize = 1 << 20;

/// Why services have no place in a directory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DirectoryError {
    /// More than the programs' tables hold.
    #[error("{0} services: expected at most {max}", max = intf::MAX_SERVICES)]
    TooMany(usize),
    /// The same VIP, port and protocol twice.
    #[error("service {0} is listed twice")]
    Duplicate(ServiceAddress),
    /// The packet path does not read IPv6 yet.
    #[error("service {0}: only IPv4 VIPs are balanced so far")]
    NotIpv4(ServiceAddress),
    /// Port 0 is no port.
    #[error("service {0}: expected a port from 1 to 65535")]
    PortZero(ServiceAddress),
    /// Not met in practice: [`SEEDS_TRIED`] seeds failed.
    #[error("no perfect hash was found for {0} services")]
    NoSeed(usize),
}

/// The 64 bits that alone name an IPv4 service (`struct service_key` of `bpf/intf.h`).
fn tail(key: &intf::service_key) -> u64 {
    u64::from(key.address[3]) | u64::from(key.port) << 32 | u64::from(key.protocol) << 48 | u64::from(key.family) << 56
}

fn slot(tail: u64, seed: u64) -> usize {
    (tail.wrapping_mul(seed) >> intf::SERVICE_SLOT_SHIFT) as usize
}

/// A directory in which each service stands with its number, and each VIP (port and protocol 0) with
/// [`SERVICE_ADDRESS_ONLY`](intf::SERVICE_ADDRESS_ONLY).
///
/// # Errors
/// See [`DirectoryError`].
pub fn directory(services: &[(ServiceAddress, u32)]) -> Result<Box<intf::service_directory>, DirectoryError> {
    let mut directory: Box<intf::service_directory> = zerocopy::FromZeros::new_box_zeroed().expect("32 KB of memory");
    let slots = keys(services)?;
    let tails: Vec<u64> = slots.iter().map(|slot| tail(&slot.key)).collect();
    directory.seed = seed(&tails).ok_or(DirectoryError::NoSeed(services.len()))?;
    for (new, tail) in slots.into_iter().zip(tails) {
        directory.slots[slot(tail, directory.seed)] = new;
    }
    Ok(directory)
}

fn keys(services: &[(ServiceAddress, u32)]) -> Result<Vec<intf::service_slot>, DirectoryError> {
    if services.len() > intf::MAX_SERVICES as usize {
        return Err(DirectoryError::TooMany(services.len()));
    }
    let mut seen = BTreeSet::new();
    let mut slots = Vec::new();
    for (address, number) in services {
        let SocketAddr::V4(vip) = address.socket else { return Err(DirectoryError::NotIpv4(*address)) };
        if vip.port() == 0 {
            return Err(DirectoryError::PortZero(*address));
        }
        if !seen.insert(*address) {
            return Err(DirectoryError::Duplicate(*address));
        }
        slots.push(intf::service_slot { number: *number, key: address.key(), reserved: 0 });
    }
    let vips: BTreeSet<_> = services.iter().map(|(address, _)| address.socket.ip()).collect();
    slots.extend(vips.into_iter().map(|vip| intf::service_slot {
        number: intf::SERVICE_ADDRESS_ONLY,
        key: intf::service_key {
            address: address_words(vip),
            port: 0,
            protocol: 0,
            family: intf::ADDRESS_FAMILY_IPV4 as u8,
        },
        reserved: 0,
    }));
    Ok(slots)
}

/// A seed that gives every tail a slot of its own.
fn seed(tails: &[u64]) -> Option<u64> {
    let mut rng = seeded_rng(0, PURPOSE_SLOT_SEEDS);
    (0..SEEDS_TRIED).map(|_| rng.next_u64() | 1).find(|seed| {
        let mut taken = [false; intf::SERVICE_SLOTS as usize];
        tails.iter().all(|tail| !std::mem::replace(&mut taken[slot(*tail, *seed)], true))
    })
}

#[cfg(test)]
mod tests {
    use coreward_model::tuple::Protocol;

    use super::*;

    fn service(text: &str) -> ServiceAddress {
        ServiceAddress { socket: text.parse().unwrap(), protocol: Protocol::Tcp }
    }

    /// What `find_service` of bpf/service.bpf.h does.
    fn find(directory: &intf::service_directory, tail_sought: u64) -> Option<u32> {
        let found = &directory.slots[slot(tail_sought, directory.seed)];
        (tail(&found.key) == tail_sought).then_some(found.number)
    }

    #[test]
    fn as_many_services_as_there_may_be_are_found_each_on_a_vip_of_its_own() {
        let mut services: Vec<(ServiceAddress, u32)> =
            (0..intf::MAX_SERVICES - 1).map(|n| (service(&format!("10.200.{n}.1:{}", 80 + n)), n)).collect();
        // TCP and UDP at the same port of the same VIP.
        services.push((ServiceAddress { protocol: Protocol::Udp, ..services[0].0 }, intf::MAX_SERVICES - 1));
        let directory = directory(&services).unwrap();
        for (address, number) in &services {
            let key = address.key();
            assert_eq!(find(&directory, tail(&key)), Some(*number));
            assert_eq!(
                find(&directory, tail(&intf::service_key { port: 0, protocol: 0, ..key })),
                Some(intf::SERVICE_ADDRESS_ONLY)
            );
            assert_eq!(find(&directory, tail(&intf::service_key { port: 0, ..key })), None);
            assert_eq!(find(&directory, tail(&intf::service_key { port: 1, ..key })), None);
        }
        assert_eq!(find(&directory, 0), Some(0), "empty slots hold the tail 0, which no packet has");
    }

    #[test]
    fn what_has_no_place_is_refused() {
        let text = |services: &[(ServiceAddress, u32)]| directory(services).unwrap_err().to_string();
        let one = service("10.0.0.1:80");
        assert_eq!(text(&[(one, 0), (one, 1)]), "service 10.0.0.1:80/tcp is listed twice");
        assert_eq!(text(&vec![(one, 0); 65]), "65 services: expected at most 64");
        assert_eq!(text(&[(service("10.0.0.1:0"), 0)]), "service 10.0.0.1:0/tcp: expected a port from 1 to 65535");
        assert_eq!(text(&[(service("[::1]:80"), 0)]), "service [::1]:80/tcp: only IPv4 VIPs are balanced so far");
    }
}
