//! Changes of the stored records that time causes: bucket histories and steps of the key rotation.

use std::time::Duration;

use coreward_controller::rotation::KeyRotationStep;
use tokio::time::MissedTickBehavior;

use super::controller_state::ControllerState;
use super::state_manager::FleetRecordChange;

/// Interval of checks for changed servers of buckets, and for the next step of a key rotation.
const PERIODIC_RECORD_CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Writes changed servers of buckets, and due steps of key rotations, to the records. Never returns.
pub async fn store_histories_and_rotate_keys(controller_state: &ControllerState) {
    let mut poll_timer = tokio::time::interval(PERIODIC_RECORD_CHECK_INTERVAL);
    poll_timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_step_delay_reason = None;
    loop {
        poll_timer.tick().await;
        let now = controller_state.now();
        store_changed_bucket_histories(controller_state).await;
        let due_key_step = controller_state.lock_controller().due_rotation_step(now);
        match due_key_step {
            Ok(None) => last_step_delay_reason = None,
            Ok(Some(step)) => request_rotation_step(controller_state, step).await,
            Err(reason) => {
                if last_step_delay_reason.as_ref() != Some(&reason) {
                    tracing::warn!(
                        event = "key-step-delayed",
                        %reason,
                        "the controller delays the next step of the cookie key rotation"
                    );
                }
                last_step_delay_reason = Some(reason);
            }
        }
    }
}

async fn store_changed_bucket_histories(controller_state: &ControllerState) {
    let histories = controller_state.lock_controller().take_changed_bucket_histories();
    if histories.is_empty() {
        return;
    }
    let services = histories.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(",");
    if let Err(error) =
        controller_state.request_change_by_controller(FleetRecordChange::StoreBucketHistories(histories)).await
    {
        tracing::warn!(
            event = "buckets-not-stored",
            services,
            error = format!("{error:#}"),
            "the controller cannot store which servers had the services' buckets before: after a restart, connections \
             to these servers may break"
        );
    }
}

async fn request_rotation_step(controller_state: &ControllerState, step: KeyRotationStep) {
    match controller_state.request_change_by_controller(FleetRecordChange::TakeKeyRotationStep(step)).await {
        Ok(_) => tracing::info!(
            event = "key-step",
            step = step.describe(),
            "the controller has taken the next step of the cookie key rotation"
        ),
        Err(error) => tracing::warn!(
            event = "key-step-failed",
            step = step.describe(),
            error = format!("{error:#}"),
            "the controller cannot take the next step of the cookie key rotation and retries"
        ),
    }
}
