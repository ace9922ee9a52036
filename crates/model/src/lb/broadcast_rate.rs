//! Rate limits of broadcasts (`bpf/lb/broadcast.h`) by the generic cell rate algorithm (ITU-T I.371, Annex A), which
//! needs one word of state per token bucket.

use std::net::{IpAddr, SocketAddr};

use coreward_intf as intf;

use crate::connection_table::ConnectionHash;
use crate::cookie::CookieKey;

/// Rate limit of a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucketRate {
    /// Interval in which one token is added to the bucket.
    pub token_interval_ns: u64,
    /// Maximum time by which tokens may be taken in advance, which sets the size of a burst.
    pub burst_ns: u64,
}

/// State of one token bucket of the generic cell rate algorithm.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TokenBucket {
    /// Time (ns) until which the bucket has been used, which is the algorithm's theoretical arrival time.
    pub paid_until_ns: u64,
}

impl TokenBucket {
    /// Takes a token from the bucket, or returns false if it has none.
    pub fn take_token(&mut self, rate: TokenBucketRate, now_ns: u64) -> bool {
        let start_ns = self.paid_until_ns.max(now_ns);
        if start_ns - now_ns > rate.burst_ns {
            return false;
        }
        self.paid_until_ns = start_ns.wrapping_add(rate.token_interval_ns);
        true
    }
}

/// Reason for which a packet is broadcast, or for which an ICMP error is sent to its sender (`enum limited_kind`).
pub type BroadcastReason = intf::limited_kind;
/// Number of reasons for which a packet is broadcast.
pub const BROADCAST_REASON_COUNT: usize = intf::LIMITED_KIND_COUNT as usize;

/// Rate limits of the broadcasts for one reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BroadcastRates {
    /// Rate limit for each source address.
    pub per_source: TokenBucketRate,
    /// Rate limit for each service.
    pub per_service: TokenBucketRate,
    /// Rate limit for the whole load balancer.
    pub total: TokenBucketRate,
}

/// Selector of some of the token buckets that limit broadcasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenBucketSelector {
    /// The bucket for one service and one reason. The service is identified by its slot.
    ServiceSlot(usize, BroadcastReason),
    /// The bucket for all broadcasts of the load balancer for one reason.
    WholeLoadBalancer(BroadcastReason),
    /// Every eighth of the buckets for source addresses, starting at this index.
    EveryEighthSourceFrom(usize),
}

impl TokenBucketSelector {
    /// Returns the indexes of the buckets that [`EveryEighthSourceFrom(first_index)`](Self::EveryEighthSourceFrom)
    /// selects.
    pub fn source_token_bucket_indexes(first_index: usize) -> impl Iterator<Item = usize> {
        (first_index % 8..intf::BROADCAST_SHARDS as usize).step_by(8)
    }
}

#[derive(Debug)]
pub(super) struct BroadcastLimiter {
    source_token_buckets: Vec<TokenBucket>,
    service_token_buckets: Vec<[TokenBucket; BROADCAST_REASON_COUNT]>,
    total_token_buckets: [TokenBucket; BROADCAST_REASON_COUNT],
}

impl Default for BroadcastLimiter {
    fn default() -> Self {
        Self {
            source_token_buckets: vec![TokenBucket::default(); intf::BROADCAST_SHARDS as usize],
            service_token_buckets: vec![Default::default(); intf::MAX_SERVICES as usize],
            total_token_buckets: Default::default(),
        }
    }
}

impl BroadcastLimiter {
    /// Takes the tokens for a broadcast of a packet from `source` to a service's servers. Returns false if the service
    /// or the load balancer has no token left. For a source above its own rate, this happens at half of the burst.
    pub fn take_tokens(
        &mut self,
        key: &CookieKey,
        (service_slot, source): (usize, IpAddr),
        reason: BroadcastReason,
        rates: &[BroadcastRates; BROADCAST_REASON_COUNT],
        now_ns: u64,
    ) -> bool {
        let keyed_source = SocketAddr::new(source, (reason as u16).swap_bytes());
        let source_bucket_index = ConnectionHash::new(key, service_slot as u16, keyed_source).low_half() as usize
            % self.source_token_buckets.len();
        let (reason, rates) = (reason as usize, rates[reason as usize]);
        let is_source_within_rate = self.source_token_buckets[source_bucket_index].take_token(rates.per_source, now_ns);
        // A source above its rate leaves half of the burst to other sources.
        let reduced_rate_if_source_exceeds = |rate: TokenBucketRate| TokenBucketRate {
            burst_ns: rate.burst_ns >> u32::from(!is_source_within_rate),
            ..rate
        };
        self.service_token_buckets[service_slot][reason]
            .take_token(reduced_rate_if_source_exceeds(rates.per_service), now_ns)
            && self.total_token_buckets[reason].take_token(reduced_rate_if_source_exceeds(rates.total), now_ns)
    }

    pub fn set_token_bucket_paid_until(&mut self, buckets: TokenBucketSelector, paid_until_ns: u64) {
        let bucket = TokenBucket { paid_until_ns };
        match buckets {
            TokenBucketSelector::ServiceSlot(service, reason) => {
                self.service_token_buckets[service][reason as usize] = bucket
            }
            TokenBucketSelector::WholeLoadBalancer(reason) => self.total_token_buckets[reason as usize] = bucket,
            TokenBucketSelector::EveryEighthSourceFrom(first_index) => {
                TokenBucketSelector::source_token_bucket_indexes(first_index)
                    .for_each(|index| self.source_token_buckets[index] = bucket)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn token_bucket_allows_a_burst_and_then_the_rate() {
        let rate = TokenBucketRate { token_interval_ns: 10, burst_ns: 20 };
        let mut bucket = TokenBucket::default();
        let count_taken_tokens =
            |bucket: &mut TokenBucket, now| (0..5).filter(|_| bucket.take_token(rate, now)).count();
        assert_eq!(count_taken_tokens(&mut bucket, 1000), 3);
        assert_eq!(count_taken_tokens(&mut bucket, 1009), 0);
        assert_eq!(count_taken_tokens(&mut bucket, 1010), 1);
        assert_eq!(count_taken_tokens(&mut bucket, 5000), 3);
    }

    /// Returns how many of 100 genuine packets, each from another source, are accepted within a second. Meanwhile, each
    /// source of `junk_sources` sends 10,000 packets.
    fn count_accepted_genuine_packets(
        junk_sources: &[(Ipv4Addr, usize, BroadcastReason)],
        genuine_slot_and_reason: (usize, BroadcastReason),
    ) -> usize {
        let rate_with_burst = |per_second: u64, burst: u64| TokenBucketRate {
            token_interval_ns: 1_000_000_000 / per_second,
            burst_ns: (burst - 1) * 1_000_000_000 / per_second,
        };
        let broadcast_rates = [BroadcastRates {
            per_source: rate_with_burst(250, 64),
            per_service: rate_with_burst(1000, 128),
            total: rate_with_burst(3000, 300),
        }; BROADCAST_REASON_COUNT];
        let (mut limiter, key) =
            (BroadcastLimiter::default(), CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 });
        let mut accepted_count = 0;
        for n in 0..10_000u64 {
            let now_ns = 1_000_000_000 + n * 100_000;
            for (source, service, reason) in junk_sources {
                limiter.take_tokens(&key, (*service, (*source).into()), *reason, &broadcast_rates, now_ns);
            }
            if n % 100 == 0 {
                let (source, (service, reason)) = (Ipv4Addr::from(0x0a00_0000 + n as u32), genuine_slot_and_reason);
                accepted_count +=
                    usize::from(limiter.take_tokens(&key, (service, source.into()), reason, &broadcast_rates, now_ns));
            }
        }
        accepted_count
    }

    #[test]
    fn one_source_cannot_use_up_the_broadcast_rate() {
        let junk_sources = [(Ipv4Addr::new(192, 0, 2, 1), 0, intf::LIMITED_ICMP_ERROR)];
        assert_eq!(count_accepted_genuine_packets(&junk_sources, (0, intf::LIMITED_ICMP_ERROR)), 100);
    }

    #[test]
    fn junk_does_not_reduce_broadcasts_for_other_reasons_and_services() {
        let junk_sources_for =
            |reason| (0..60).map(move |n| (Ipv4Addr::new(192, 0, 2, n), 0, reason)).collect::<Vec<_>>();
        // By chance, 1.5 of 100 sources share a bucket with one of 60 among 4,096 (8 at five standard deviations).
        let accepted_count_for_other_reason = count_accepted_genuine_packets(
            &junk_sources_for(intf::LIMITED_UNKNOWN_COOKIE),
            (0, intf::LIMITED_ICMP_ERROR),
        );
        assert!(accepted_count_for_other_reason >= 92, "{accepted_count_for_other_reason}");
        let accepted_count_for_other_service =
            count_accepted_genuine_packets(&junk_sources_for(intf::LIMITED_ICMP_ERROR), (1, intf::LIMITED_ICMP_ERROR));
        assert!(accepted_count_for_other_service >= 92, "{accepted_count_for_other_service}");
        let accepted_count_for_same_service =
            count_accepted_genuine_packets(&junk_sources_for(intf::LIMITED_ICMP_ERROR), (0, intf::LIMITED_ICMP_ERROR));
        assert!(accepted_count_for_same_service < 50, "{accepted_count_for_same_service}");
    }

    #[test]
    fn total_rate_limits_all_services_together() {
        let rate = TokenBucketRate { token_interval_ns: 1_000_000, burst_ns: 0 };
        let total_rate = TokenBucketRate { token_interval_ns: 100_000, burst_ns: 0 };
        let rates = [BroadcastRates { per_source: rate, per_service: rate, total: total_rate }; BROADCAST_REASON_COUNT];
        let (mut limiter, key) =
            (BroadcastLimiter::default(), CookieKey { k0: 0x5d3c_91ab_04e7_aa13, k1: 0x0f1e_77c9_d2b4_5a61 });
        let accepted_packet_count = (0..1_000_000u64)
            .filter(|n| {
                let slot_and_source = ((n % 1024) as usize, Ipv4Addr::from(*n as u32).into());
                limiter.take_tokens(&key, slot_and_source, intf::LIMITED_RESET, &rates, 1_000_000_000 + n * 1000)
            })
            .count();
        assert!((9_000..=10_001).contains(&accepted_packet_count), "{accepted_packet_count}");
    }
}
