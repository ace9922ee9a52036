//! gRPC status of rejected streams.

use coreward_controller::rejection::Rejection;
use tonic::Status;

/// Returns the gRPC status of a rejection that ends a stream.
pub fn rejection_status(rejection: &Rejection) -> Status {
    let message = rejection.to_string();
    match rejection {
        Rejection::UnknownServer(_) => Status::not_found(message),
        Rejection::DuplicateSession { .. }
        | Rejection::DuplicateLoadBalancer { .. }
        | Rejection::DuplicateRack { .. }
        | Rejection::Superseded(_) => Status::already_exists(message),
        Rejection::UnknownRack(_) | Rejection::UnknownLoadBalancer(_) | Rejection::ForeignRack { .. } => {
            Status::permission_denied(message)
        }
        Rejection::TooManyRegistrations(_) | Rejection::TooManyLoadBalancers(_) => Status::resource_exhausted(message),
        _ => Status::invalid_argument(message),
    }
}
