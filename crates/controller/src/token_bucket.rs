//! Rate limits, each with a long-term rate and a burst.

use std::time::Duration;

/// Token bucket that limits the rate of one peer's messages.
#[derive(Debug, Clone, Copy)]
pub struct TokenBucket {
    available_token_count: f64,
    updated_at: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenBucketQuota {
    /// Mean time between two tokens, which is the inverse of the rate.
    pub token_interval: Duration,
    /// Maximum number of tokens in the bucket, which is the burst after a pause.
    pub max_burst_tokens: u32,
}

impl TokenBucketQuota {
    pub fn from(self, now: Duration) -> TokenBucket {
        TokenBucket { available_token_count: self.max_burst_tokens.into(), updated_at: now }
    }
}

impl TokenBucket {
    /// Takes a token if one is left. Returns whether a token was taken. `now` is the time since the controller's start.
    pub fn try_take(&mut self, quota: TokenBucketQuota, now: Duration) -> bool {
        let elapsed_s = now.saturating_sub(self.updated_at).as_secs_f64();
        self.updated_at = now;
        self.available_token_count = (self.available_token_count + elapsed_s / quota.token_interval.as_secs_f64())
            .min(quota.max_burst_tokens.into());
        let is_token_left = self.available_token_count >= 1.0;
        self.available_token_count -= f64::from(u8::from(is_token_left));
        is_token_left
    }
}

impl TokenBucket {
    /// Returns the time until the next token is available, or zero if one is left. Takes no token.
    pub fn time_until_token(&self, quota: TokenBucketQuota, now: Duration) -> Duration {
        let token_interval_s = quota.token_interval.as_secs_f64();
        let available_tokens =
            self.available_token_count + now.saturating_sub(self.updated_at).as_secs_f64() / token_interval_s;
        // The result is one nanosecond longer, because a rounded-down time would end before the token exists.
        if available_tokens >= 1.0 {
            Duration::ZERO
        } else {
            Duration::from_secs_f64((1.0 - available_tokens) * token_interval_s) + Duration::from_nanos(1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn burst_is_followed_by_tokens_at_the_configured_rate() {
        let quota = TokenBucketQuota { token_interval: Duration::from_millis(50), max_burst_tokens: 3 };
        let mut bucket = quota.from(Duration::ZERO);
        let mut count_taken_tokens =
            |ms: u64| (0..10).filter(|_| bucket.try_take(quota, Duration::from_millis(ms))).count();
        assert_eq!(
            (
                count_taken_tokens(0),
                count_taken_tokens(49),
                count_taken_tokens(50),
                count_taken_tokens(150),
                count_taken_tokens(10_000)
            ),
            (3, 0, 1, 2, 3)
        );
    }

    #[test]
    fn wait_ends_when_a_token_is_available() {
        let quota = TokenBucketQuota { token_interval: Duration::from_millis(50), max_burst_tokens: 1 };
        let mut bucket = quota.from(Duration::ZERO);
        assert_eq!(bucket.time_until_token(quota, Duration::ZERO), Duration::ZERO);
        for now in [0, 3, 71].map(Duration::from_millis) {
            let now = now + bucket.time_until_token(quota, now);
            assert!(bucket.try_take(quota, now), "{now:?}");
        }
    }
}
