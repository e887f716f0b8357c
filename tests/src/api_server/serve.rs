//! Answers requests.

use std::convert::Infallible;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName, RETRY_AFTER, USER_AGENT};
use hyper::{HeaderMap, Request as HttpRequest, Response, StatusCode};
use serde_json::{Value, json};

use super::content::{Content, Writer};
use super::discovery;
use super::faults::Fault;
use super::list;
use super::listen::Connection;
use super::log::Request;
use super::query::{ObjectPath, Query, Target, Verb, query, target, verb};
use super::shape::Shape;
use super::state::Shared;
use super::status::Failure;
use super::watch::Watch;
use super::write::{self, Admit, Deleted, Deletion};
use crate::admission::Review;

/// Largest body of a request, as real servers have it.
const MAX_BODY: usize = 3 << 20;

/// The answer to a request.
#[derive(Debug)]
enum Answer {
    Json(StatusCode, Value),
    Text(&'static str),
    Watch(Box<Watch>),
}

/// A request as read.
#[derive(Debug)]
struct Asked {
    target: Target,
    verb: Verb,
    query: Query,
    headers: HeaderMap,
    body: Bytes,
}

/// Answers a request.
pub(super) async fn serve(
    shared: Arc<Shared>,
    connection: Arc<Connection>,
    request: HttpRequest<Incoming>,
) -> Result<Response<Content>, Infallible> {
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await.map(|body| body.to_bytes());
    let target = target(head.uri.path());
    let query = query(head.uri.query().unwrap_or_default());
    let verb = verb(head.method.as_str(), &target, &query);
    let too_large = body.is_err();
    let asked = Asked { target, verb, query, headers: head.headers, body: body.unwrap_or_default() };
    let entry = logged(&asked, head.uri.path(), connection.number);
    let faults = shared.faults.hit(&entry);
    let token = entry.token.clone();
    let number = shared.log.add(entry);

    let spoiled = spoil(&faults, &connection).await;
    let answer = match spoiled {
        Some(failure) => Err(failure),
        None if !is_allowed(&shared, &asked, token.as_deref()) => Err(Failure::of_code(401)),
        None if too_large => Err(Failure::too_large()),
        None => answer(&shared, &asked),
    };
    let response = respond(&shared, &connection, answer, &faults);
    shared.log.answered(number, response.status().as_u16());
    Ok(response)
}

fn header(headers: &HeaderMap, name: HeaderName) -> String {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
}

fn logged(asked: &Asked, path: &str, connection: u64) -> Request {
    let authorization = header(&asked.headers, AUTHORIZATION);
    let (api_version, resource, namespace, name) = match &asked.target {
        Target::Objects(path) => {
            let resource = match &path.subresource {
                Some(subresource) => format!("{}/{subresource}", path.kind.resource),
                None => path.kind.resource.to_owned(),
            };
            (path.kind.api_version(path.version), resource, path.namespace.clone(), path.name.clone())
        }
        _ => (String::new(), path.to_owned(), None, None),
    };
    Request {
        at: Instant::now(),
        verb: asked.verb,
        api_version,
        resource,
        namespace,
        name,
        query: asked.query.clone(),
        accept: header(&asked.headers, hyper::header::ACCEPT),
        user_agent: header(&asked.headers, USER_AGENT),
        token: authorization.strip_prefix("Bearer ").map(str::to_owned),
        body: serde_json::from_slice(&asked.body).unwrap_or_default(),
        connection,
        answer: None,
    }
}

/// Applies faults before there is an answer; returns the answer of a fault, if one gives it.
async fn spoil(faults: &[Fault], connection: &Connection) -> Option<Failure> {
    for fault in faults {
        match fault {
            Fault::Delay(time) => tokio::time::sleep(*time).await,
            Fault::Answer(code) => return Some(Failure::of_code(*code)),
            Fault::AnswerRetryAfter(code, seconds) => {
                return Some(Failure::of_code(*code).retried_after(*seconds));
            }
            Fault::NoAnswer => std::future::pending().await,
            Fault::Reset => {
                connection.reset();
                std::future::pending::<()>().await;
            }
            Fault::CutOff { .. } | Fault::Slow(_) => {}
        }
    }
    None
}

/// Whether the request may be made: health and version need no token.
fn is_allowed(shared: &Shared, asked: &Asked, token: Option<&str>) -> bool {
    matches!(asked.target, Target::Health | Target::Version)
        || token.is_some_and(|token| shared.tokens().contains(token))
}

fn answer(shared: &Shared, asked: &Asked) -> Result<Answer, Failure> {
    match &asked.target {
        Target::Health => Ok(Answer::Text("ok")),
        Target::Version => Ok(Answer::Json(StatusCode::OK, discovery::version(shared))),
        Target::Discovery(document) => {
            let document = discovery::document(shared, document).ok_or_else(Failure::unserved)?;
            Ok(Answer::Json(StatusCode::OK, document))
        }
        Target::Rights => rights(shared, asked),
        Target::Unknown => Err(Failure::unserved()),
        Target::Objects(path) if !shared.is_served(path.kind, path.version) => Err(Failure::unserved()),
        Target::Objects(path) => objects(shared, asked, path),
    }
}

fn objects(shared: &Shared, asked: &Asked, path: &ObjectPath) -> Result<Answer, Failure> {
    let admit = |old: Option<&Value>, new: &Value| admit(shared, asked.verb, path, old, new);
    let shape = Shape::of(path.kind, path.version, &asked.headers);
    if path.subresource.as_deref() == Some("eviction") {
        return evict(shared, asked, path, &admit);
    }
    let status = path.kind.status && path.subresource.as_deref() == Some("status");
    if path.subresource.is_some() && !status {
        return Err(Failure::unserved());
    }
    let name = path.name.as_deref();
    let ok = |object: &Value| Ok(Answer::Json(StatusCode::OK, shape.object(object)));
    match (asked.verb, name) {
        (Verb::Get, Some(name)) => {
            let key = write::key(path.kind, path.namespace.as_deref(), name);
            let object = shared.store().get(&key).ok_or_else(|| Failure::not_found(path.kind, name))?;
            ok(&object)
        }
        (Verb::List, None) => {
            let newest = shared.faults.listed_at(path.kind.resource);
            Ok(Answer::Json(StatusCode::OK, list::page(&shared.store(), newest, path, &shape, &asked.query)?))
        }
        (Verb::Watch, None) => Ok(Answer::Watch(Box::new(list::watch(shared, path, shape, &asked.query)?))),
        (Verb::Create, None) if path.namespace.is_some() == path.kind.namespaced => {
            let object = json_body(asked, "application/json")?;
            let namespace = path.namespace.as_deref();
            let made =
                shared.change(|store| write::create(store, path.kind, namespace, object, Some(&admit)))?;
            Ok(Answer::Json(StatusCode::CREATED, shape.object(&made)))
        }
        (Verb::Update, Some(_)) => {
            let object = json_body(asked, "application/json")?;
            ok(&*shared.change(|store| write::replace(store, path, object, &admit))?)
        }
        (Verb::Patch, Some(_)) => {
            let patch = json_body(asked, "application/merge-patch+json")?;
            let foreign = shared.settings.foreign_uid;
            ok(&*shared.change(|store| write::patch(store, path, &patch, foreign, &admit))?)
        }
        (Verb::Delete, Some(name)) => {
            let deletion = deletion(asked, &asked.query)?;
            match shared.change(|store| delete(store, path, name, &deletion))? {
                Deleted::Later(object) => ok(&object),
                Deleted::Now(object) => Ok(Answer::Json(StatusCode::OK, deleted(path, &object))),
            }
        }
        _ => Err(Failure::method_not_allowed()),
    }
}

fn delete(
    store: &mut super::store::Store,
    path: &ObjectPath,
    name: &str,
    deletion: &Deletion,
) -> Result<Deleted, Failure> {
    write::delete(store, path.kind, path.namespace.as_deref(), name, deletion)
}

fn deleted(path: &ObjectPath, object: &Value) -> Value {
    let metadata = &object["metadata"];
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success",
        "details": {"name": metadata["name"], "group": path.kind.group, "kind": path.kind.resource, "uid": metadata["uid"]}
    })
}

/// Asks the admission policies about a write.
fn admit(
    shared: &Shared,
    verb: Verb,
    path: &ObjectPath,
    old: Option<&Value>,
    new: &Value,
) -> Result<(), Failure> {
    let Some(admission) = &*shared.admission() else { return Ok(()) };
    let resource = path.kind.resource;
    // A real server shows the parts of an object even if they are empty.
    let shown = |object: &Value| {
        let mut object = object.clone();
        if path.kind.status && path.subresource.as_deref() != Some("eviction") {
            for part in ["spec", "status"] {
                if object[part].is_null() {
                    object[part] = json!({});
                }
            }
        }
        object
    };
    let review = Review {
        operation: if verb == Verb::Create { "CREATE" } else { "UPDATE" },
        group: path.kind.group.to_owned(),
        version: path.version.to_owned(),
        resource: path.subresource.as_ref().map_or(resource.to_owned(), |it| format!("{resource}/{it}")),
        user: admission.user.clone(),
        object: shown(new),
        old: old.map(shown).unwrap_or_default(),
    };
    let verdict = admission.policies.judge(&review);
    admission.reviews.lock().unwrap_or_else(PoisonError::into_inner).push(review);
    verdict.map_err(|refusal| {
        let name = path.name.as_deref().or(new["metadata"]["name"].as_str()).unwrap_or_default();
        Failure::not_admitted(path.kind, name, refusal.code, &refusal.message)
    })
}

fn evict(shared: &Shared, asked: &Asked, path: &ObjectPath, admit: Admit<'_>) -> Result<Answer, Failure> {
    let (Verb::Create, Some(name), "pods") = (asked.verb, &path.name, path.kind.resource) else {
        return Err(Failure::unserved());
    };
    let eviction = json_body(asked, "application/json")?;
    admit(None, &eviction)?;
    let options = &eviction["deleteOptions"];
    let deletion = Deletion {
        grace: options["gracePeriodSeconds"].as_u64(),
        uid: options["preconditions"]["uid"].as_str().map(str::to_owned),
    };
    shared.change(|store| delete(store, path, name, &deletion))?;
    let success =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Ok(Answer::Json(StatusCode::CREATED, success))
}

/// A `SelfSubjectAccessReview`.
fn rights(shared: &Shared, asked: &Asked) -> Result<Answer, Failure> {
    let mut review = json_body(asked, "application/json")?;
    let attributes = &review["spec"]["resourceAttributes"];
    let text = |key: &str| attributes[key].as_str().unwrap_or_default();
    let resource = match text("subresource") {
        "" => text("resource").to_owned(),
        subresource => format!("{}/{subresource}", text("resource")),
    };
    let allowed = !shared.denied().contains(&(text("verb").to_owned(), resource));
    review["status"] = json!({ "allowed": allowed });
    Ok(Answer::Json(StatusCode::CREATED, review))
}

fn deletion(asked: &Asked, query: &Query) -> Result<Deletion, Failure> {
    let options = if asked.body.is_empty() { Value::Null } else { json_body(asked, "application/json")? };
    let in_query = query.get("gracePeriodSeconds").and_then(|text| text.parse().ok());
    Ok(Deletion {
        grace: options["gracePeriodSeconds"].as_u64().or(in_query),
        uid: options["preconditions"]["uid"].as_str().map(str::to_owned),
    })
}

fn json_body(asked: &Asked, media_type: &str) -> Result<Value, Failure> {
    let said = header(&asked.headers, CONTENT_TYPE);
    let essence = said.split(';').next().unwrap_or_default().trim();
    if essence != media_type {
        return Err(Failure::unsupported(&said));
    }
    serde_json::from_slice(&asked.body)
        .map_err(|error| Failure::bad_request(format!("the body of the request cannot be read: {error}")))
}

fn respond(
    shared: &Arc<Shared>,
    connection: &Arc<Connection>,
    answer: Result<Answer, Failure>,
    faults: &[Fault],
) -> Response<Content> {
    let spoiled = faults.iter().any(|fault| matches!(fault, Fault::CutOff { .. } | Fault::Slow(_)));
    let (status, media_type, bytes, retry_after) = match answer {
        Ok(Answer::Watch(watch)) => {
            let (writer, content) = Content::streamed(connection, faults);
            tokio::spawn(watch.run(Arc::clone(shared), writer));
            return headed(StatusCode::OK, "application/json", None, content);
        }
        Ok(Answer::Json(status, value)) => (status, "application/json", value.to_string(), None),
        Ok(Answer::Text(text)) => (StatusCode::OK, "text/plain; charset=utf-8", text.to_owned(), None),
        Err(failure) => {
            let status = StatusCode::from_u16(failure.code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
            if failure.plain {
                (status, "text/plain; charset=utf-8", failure.text().to_owned(), None)
            } else {
                (status, "application/json", failure.status().to_string(), failure.retry_after)
            }
        }
    };
    let bytes = Bytes::from(bytes);
    let content = if spoiled {
        let (writer, content) = Content::streamed(connection, faults);
        tokio::spawn(Writer::answer(writer, bytes));
        content
    } else {
        Content::whole(bytes)
    };
    headed(status, media_type, retry_after, content)
}

fn headed(
    status: StatusCode,
    media_type: &'static str,
    retry_after: Option<u64>,
    content: Content,
) -> Response<Content> {
    let mut response = Response::new(content);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(media_type));
    if let Some(seconds) = retry_after {
        headers.insert(RETRY_AFTER, seconds.into());
    }
    response
}
