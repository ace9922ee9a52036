//! Tests that forged TSecr values reach a server at most as often as its share of all ids.
//!
//! A permutation, which the keyed hash of the 4-tuple selects, hides the 15 bits of a cookie (kind and id). Therefore:
//!
//! * A random TSecr maps to each of the 2^15 values with the same probability. It reaches each known server with
//!   probability 2^-15, and no unknown server.
//! * A cookie that is used on another connection (with another 4-tuple) maps like a random TSecr.
//! * A valid cookie with a flip in its low 16 bits maps like a random TSecr. (A flip of the key bit selects the other
//!   key.) A flip in the upper 16 bits (the time) has no effect.
//!
//! There is no protection against a client that tries all 2^14 values on one connection. It reaches every server with
//! one packet, as it would with any 14 bits.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use anyhow::ensure;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{self, Cookie, CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb::{ServerMapEntry, TokenBucketSelector};
use coreward_model::tuple::TransportProtocol;
use coreward_model::{FourTuple, ServerId, ServiceAddress};

use crate::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use crate::fuzz_rng::FuzzRng;
use crate::harness::{FuzzHarness, FuzzHarnessSetup, LOAD_BALANCER_MAC, TIME_KEY};
use crate::state_change::LoadBalancerStateChange;

const SERVICE_ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const TCP_FLAG_ACK: u8 = 0x10;

/// Result of sending forged TSecr values: the number of packets that reached each server.
#[derive(Debug, Clone)]
pub struct TsecrCoverage {
    pub tried_tsecr_count: u64,
    pub packet_count_by_server: BTreeMap<ServerId, u64>,
}

impl TsecrCoverage {
    /// Returns by how many standard deviations Pearson's chi-square of the packet counts exceeds its mean. There is a
    /// count for each server, with an expected probability of 2^-15, and one for packets without a server. (With
    /// thousands of servers, chi-square is nearly normal.)
    pub fn chi_square_z_score(&self) -> f64 {
        let server_count = self.packet_count_by_server.len() as f64;
        let expected_per_server = self.tried_tsecr_count as f64 / f64::from(intf::COOKIE_HIDDEN_MASK + 1);
        let server_hits: u64 = self.packet_count_by_server.values().sum();
        let counts_without_server = (
            self.tried_tsecr_count as f64 - expected_per_server * server_count,
            (self.tried_tsecr_count - server_hits) as f64,
        );
        let expected_and_observed = self
            .packet_count_by_server
            .values()
            .map(|count| (expected_per_server, *count as f64))
            .chain([counts_without_server]);
        let chi_square: f64 = expected_and_observed
            .map(|(expected_count, observed_count)| (observed_count - expected_count).powi(2) / expected_count)
            .sum();
        (chi_square - server_count) / (2.0 * server_count).sqrt()
    }
}

/// Counts of packets that reached a server although one bit of their cookie was wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BitFlipCounts {
    /// Number of valid cookies whose bits were flipped.
    pub cookie_count: u64,
    /// Number of packets that reached another server than the cookie's server, indexed by the flipped bit of TSecr.
    pub other_server_counts_by_bit: [u64; 32],
    /// Number of packets that reached the cookie's server, indexed by the flipped bit of TSecr.
    pub same_server_counts_by_bit: [u64; 32],
}

/// Load balancer with one service, which receives packets with forged cookies.
pub struct CookieTester {
    harness: FuzzHarness,
    cookie_keys: FleetCookieKeys,
    server_ids: Vec<ServerId>,
    known_server_ids: BTreeSet<ServerId>,
    service_slot: usize,
    rng: FuzzRng,
    packet_buffer: Vec<u8>,
}

impl CookieTester {
    /// Creates a service with `server_count` servers (at most 16,384), whose ids are random. If `runs_bpf_program` is
    /// true, also loads the BPF program, which fails without the necessary capabilities.
    pub fn new(seed: u64, server_count: usize, runs_bpf_program: bool) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(seed, 1);
        let mut draw_cookie_key = || CookieKey { k0: rng.next_u64(), k1: rng.next_u64() };
        let cookie_keys =
            FleetCookieKeys { keys: [draw_cookie_key(), draw_cookie_key()], current_key_index: CookieKeyIndex::First };
        let mut harness = FuzzHarness::new(FuzzHarnessSetup::new(LOAD_BALANCER_MAC, cookie_keys), runs_bpf_program)?;
        let service_address = ServiceAddress { vip_and_port: SERVICE_ADDRESS.into(), protocol: TransportProtocol::Tcp };
        let service_slot = harness.apply_change(&LoadBalancerStateChange::ReplaceServices(vec![(
            service_address,
            ServiceSettings::default(),
        )]))?[0];
        let mut known_server_ids = BTreeSet::new();
        while known_server_ids.len() < server_count {
            let server_id = ServerId::try_from(rng.random_below(ServerId::COUNT) as u64)?;
            if known_server_ids.insert(server_id) {
                let [id_high_byte, id_low_byte] = server_id.get().to_be_bytes();
                let server = ServerMapEntry { mac: Some([2, 0, 0, 0, id_high_byte, id_low_byte]), is_eligible: true };
                harness.apply_change(&LoadBalancerStateChange::SetServer(service_slot, server_id, Some(server)))?;
            }
        }
        let server_ids = known_server_ids.iter().copied().collect();
        Ok(Self { harness, cookie_keys, server_ids, known_server_ids, service_slot, rng, packet_buffer: Vec::new() })
    }

    fn random_client_address(&mut self) -> (Ipv4Addr, u16) {
        (Ipv4Addr::from(self.rng.next_u32()), self.rng.next_u16())
    }

    /// Returns a random server, and a valid cookie for it under one of the two keys.
    fn random_valid_cookie(&mut self, client: (Ipv4Addr, u16)) -> (ServerId, u32) {
        let server_id = self.rng.pick(&self.server_ids);
        let key_index = self.rng.pick(&[CookieKeyIndex::First, CookieKeyIndex::Second]);
        let keys_with_random_current = FleetCookieKeys { current_key_index: key_index, ..self.cookie_keys };
        let tsecr = cookie::stamp_tsval(
            &keys_with_random_current,
            &TIME_KEY,
            &FourTuple::ipv4(client, SERVICE_ADDRESS),
            Cookie::Server(server_id),
            self.rng.next_u32(),
        );
        (server_id, tsecr)
    }

    /// Sends a packet with this TSecr. Returns the server that it reaches, or `None` when it is broadcast.
    fn send_packet_and_find_server(&mut self, client: (Ipv4Addr, u16), tsecr: u32) -> anyhow::Result<Option<ServerId>> {
        let unknown_cookie_buckets = TokenBucketSelector::ServiceSlot(self.service_slot, intf::LIMITED_UNKNOWN_COOKIE);
        self.harness.apply_change(&LoadBalancerStateChange::SetHasBroadcastTokens(unknown_cookie_buckets, true))?;
        let ip_header = EthernetIpHeader {
            destination_mac: LOAD_BALANCER_MAC,
            source: client.0,
            destination: SERVICE_ADDRESS.0,
            protocol: frame::PROTOCOL_TCP,
            ip_identification: 0,
            fragment_flags_and_offset: 0x4000,
            option_word_count: 0,
            tos_and_ttl: [0, 64],
        };
        let tcp_options = [&[1, 1][..], &timestamp_option(1, tsecr)].concat();
        let tcp_header = TcpHeader {
            source_and_destination_ports: (client.1, SERVICE_ADDRESS.1),
            tcp_flags: TCP_FLAG_ACK,
            options: tcp_options,
        };
        self.packet_buffer.clear();
        ip_header.append_frame(&mut self.packet_buffer, |packet| tcp_header.append_segment(packet, (1, 1), 0));
        let (outcome, difference) = self.harness.process_packet(&self.packet_buffer)?;
        if let Some(difference) = difference {
            anyhow::bail!("BPF program and reference model differ in {difference}");
        }
        let destination_mac = &self.harness.last_model_frame()[..6];
        match outcome.server {
            Some(id) => {
                ensure!(self.known_server_ids.contains(&id), "a TSecr reached {id}, which is not known");
                ensure!(
                    destination_mac == [&[2, 0, 0, 0][..], &id.get().to_be_bytes()].concat(),
                    "sent to {destination_mac:x?}, not to {id}"
                );
            }
            None => {
                ensure!(outcome.counter == intf::LB_COUNTER_BROADCAST && destination_mac == [0xff; 6], "{outcome:?}")
            }
        }
        Ok(outcome.server)
    }

    fn measure_tsecr_coverage(
        &mut self,
        tsecr_count: u64,
        mut next_client_and_tsecr: impl FnMut(&mut Self) -> ((Ipv4Addr, u16), u32),
    ) -> anyhow::Result<TsecrCoverage> {
        let mut packets_by_server: BTreeMap<ServerId, u64> = self.server_ids.iter().map(|id| (*id, 0)).collect();
        for _ in 0..tsecr_count {
            let (client, tsecr) = next_client_and_tsecr(self);
            if let Some(id) = self.send_packet_and_find_server(client, tsecr)? {
                *packets_by_server.get_mut(&id).expect("a known server") += 1;
            }
        }
        Ok(TsecrCoverage { tried_tsecr_count: tsecr_count, packet_count_by_server: packets_by_server })
    }

    /// Sends random TSecr values from random clients. Fails when a packet reaches an unknown server, or when the
    /// program and its reference model differ.
    pub fn send_random_tsecrs(&mut self, tsecr_count: u64) -> anyhow::Result<TsecrCoverage> {
        self.measure_tsecr_coverage(tsecr_count, |tester| (tester.random_client_address(), tester.rng.next_u32()))
    }

    /// Sends `tsecr_count` packets, each with a cookie that is valid only for another connection.
    pub fn replay_cookies_on_other_connections(&mut self, tsecr_count: u64) -> anyhow::Result<TsecrCoverage> {
        self.measure_tsecr_coverage(tsecr_count, |tester| {
            let (cookie_client, other_client) = (tester.random_client_address(), tester.random_client_address());
            (other_client, tester.random_valid_cookie(cookie_client).1)
        })
    }

    /// Flips each single bit in `cookie_count` valid cookies. Fails as [`send_random_tsecrs`](Self::send_random_tsecrs)
    /// does, or when an unchanged cookie does not reach its server.
    pub fn flip_cookie_bits(&mut self, cookie_count: u64) -> anyhow::Result<BitFlipCounts> {
        let mut flip_counts = BitFlipCounts { cookie_count, ..BitFlipCounts::default() };
        for _ in 0..cookie_count {
            let client = self.random_client_address();
            let (server_id, tsecr) = self.random_valid_cookie(client);
            ensure!(
                self.send_packet_and_find_server(client, tsecr)? == Some(server_id),
                "a valid cookie of {server_id} went astray"
            );
            for bit in 0..32 {
                match self.send_packet_and_find_server(client, tsecr ^ 1 << bit)? {
                    Some(id) if id == server_id => flip_counts.same_server_counts_by_bit[bit] += 1,
                    Some(_) => flip_counts.other_server_counts_by_bit[bit] += 1,
                    None => {}
                }
            }
        }
        Ok(flip_counts)
    }
}
