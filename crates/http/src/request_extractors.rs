//! Extractors of request data for handlers. They answer a malformed request with a [`Problem`].

use std::fmt;
use std::marker::PhantomData;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, FromRequestParts, Request};
use serde::de::value::MapAccessDeserializer;
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::Problem;
use crate::endpoints::DEFAULT_MAX_REQUEST_BODY_BYTES;
use crate::request_work::{self, RequestWorkSize};

/// Extractor of the parameters in a request's query.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Query), rejection(Problem))]
pub struct Query<T>(pub T);

/// Extractor of the parameters in a request's path.
#[derive(Debug, FromRequestParts)]
#[from_request(via(axum::extract::Path), rejection(Problem))]
pub struct Path<T>(pub T);

/// JSON body of an answer, and extractor of a request's JSON body.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<S: Send + Sync, T: DeserializeOwned + Send + 'static> FromRequest<S> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let (head, body) = request.into_parts();
        // The content type is checked before the body is received, with an empty JSON object in its place.
        let request_with_empty_json_object = Request::from_parts(head.clone(), Body::from("{}"));
        axum::Json::<JsonObject<IgnoredAny>>::from_request(request_with_empty_json_object, state).await.map(drop)?;
        let bytes = Bytes::from_request(Request::from_parts(head, body), state).await?;
        let work_size =
            if bytes.len() > DEFAULT_MAX_REQUEST_BODY_BYTES { RequestWorkSize::Large } else { RequestWorkSize::Small };
        let axum::Json(JsonObject(body)) =
            request_work::run_on_worker_thread(work_size, move || axum::Json::from_bytes(&bytes)).await??;
        Ok(Self(body))
    }
}

/// Value whose JSON must be an object. For a struct, serde would also accept an array of the fields.
struct JsonObject<T>(T);

impl<'de, T: DeserializeOwned> Deserialize<'de> for JsonObject<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(JsonObjectVisitor(PhantomData))
    }
}

struct JsonObjectVisitor<T>(PhantomData<T>);

impl<'de, T: DeserializeOwned> Visitor<'de> for JsonObjectVisitor<T> {
    type Value = JsonObject<T>;

    fn expecting(&self, text: &mut fmt::Formatter<'_>) -> fmt::Result {
        text.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<JsonObject<T>, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(JsonObject)
    }
}

impl<T: Serialize> axum::response::IntoResponse for Json<T> {
    fn into_response(self) -> axum::response::Response {
        axum::Json(self.0).into_response()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct ForceRequestBody {
        #[serde(default)]
        force: bool,
    }

    #[test]
    fn request_body_must_be_a_json_object() {
        assert!(!serde_json::from_str::<JsonObject<ForceRequestBody>>("{}").unwrap().0.force);
        let error = serde_json::from_str::<JsonObject<ForceRequestBody>>("[]").map(|body| body.0).unwrap_err();
        assert!(error.to_string().contains("invalid type: sequence, expected an object"), "{error}");
    }
}
